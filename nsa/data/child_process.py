"""A child process that must not outlive its parent."""

import os
import threading
import time

_CHECK_EVERY_S = 0.5


def exit_with_parent(parent_pid: int) -> None:
    """Called in the child. A parent that was killed cannot tell its children; they notice that they were adopted."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_CHECK_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()
