"""``python -m sharedmirrord``."""

from sharedmirrord.cli import main

main()
