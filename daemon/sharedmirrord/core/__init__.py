"""The pure core: pools, pages, leases, hits and sessions as ``apply(state, event, now) -> effects``.

Nothing in this package opens a file, reads a clock, draws a random number or knows a socket.
"""
