"""Worker processes that exit when their parent dies, also when it was killed with SIGKILL."""

import os
import threading
import time

_CHECK_EVERY_S = 0.5


def exit_with_parent(parent_pid: int) -> None:
    """Call in the child: a thread polls the parent's pid, which changes when the parent is gone, and then exits."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_CHECK_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()
