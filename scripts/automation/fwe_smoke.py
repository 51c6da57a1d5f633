"""Check that FineWeb-Edu (or --source) delivers a batch in time. The same as `nsa data smoke`."""

import sys

from nsa_train.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["data", "smoke"]
    main()
