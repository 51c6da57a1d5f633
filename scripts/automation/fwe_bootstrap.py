"""Store about 5 GB of FineWeb-Edu (or --source) as local shards. The same as `nsa data bootstrap`."""

import sys

from nsa_train.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["data", "bootstrap"]
    main()
