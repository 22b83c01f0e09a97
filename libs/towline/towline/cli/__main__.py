"""`python -m towline.cli`: the command without its script."""

from towline.cli import main

main()
