"""The sidecar daemon of sharedmirror: one per node, owner of the pinned mirror."""
