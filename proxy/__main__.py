"""`python -m proxy`."""

from proxy.server import main

main()
