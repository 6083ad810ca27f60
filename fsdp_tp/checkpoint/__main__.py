import sys

from fsdp_tp.checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
