"""Bridges to engines that others wrote. Each imports its engine; sharedmirror itself imports none of them."""
