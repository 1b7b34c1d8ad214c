"""The copy engine seam: one small interface, and the engines behind it.

``interface`` holds what a mirror and an engine agree on, ``geometry`` builds it from an attach reply,
``pairs`` checks page ids, ``reference`` is the oracle of the tests, ``cpu`` and ``staged`` (CUDA) do the work.
Nothing is imported here, so that ``pairs`` can be used without torch.
"""
