"""The demo: an engine dies, its cache lives on (``sharedmirror demo``).

``run`` tells the story and runs in the command's own process, which never imports torch. ``daemon`` and
``engine`` start and end the processes of the story. ``worker`` is one rank of the engine; it has a small
real decoder (``model``) over a paged KV pool (``pool``). ``commands`` are the words between the
two, ``keys`` names pages by their prefix, ``report`` prints and keeps the verdict.
"""
