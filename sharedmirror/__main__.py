"""``python -m sharedmirror``."""

from sharedmirror.cli import main

main()
