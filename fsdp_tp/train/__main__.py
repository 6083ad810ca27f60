import sys

from fsdp_tp.train import main

sys.exit(main())
