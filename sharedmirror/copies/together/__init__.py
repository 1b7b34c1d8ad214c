"""Loads that several GPUs do together.

``exchange`` is the engine's side, ``turns`` the order of the chunks, ``board`` the memory on which the ranks
meet, ``peers`` the driver calls, ``watchdog`` what ends a load that is late. Nothing is imported here.
"""
