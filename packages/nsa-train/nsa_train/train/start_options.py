"""Options that start a run (--resume, --resume-from, --init-from, --clear-halt, --allow), shared by `nsa train`, `nsa
launch`, the launcher and the run itself. They are not settings: a checkpoint does not save them.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from nsa.errors import CheckpointError
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder, open_folder, resolve_links


def is_exported_folder(path: Path) -> bool:
    """Whether a folder is in Transformers' format, and not a run or a checkpoint."""
    return (path / "config.json").exists() and not (path / names.CHECKPOINTS).exists()


@dataclass(frozen=True)
class StartOptions:
    """`to_args` writes the options as arguments of `nsa train`, whose command line is the way back.

    A field added here must be an option of both commands: tests/nsa_train/cli/test_start_options.py checks every field.
    """

    resume: bool = False
    """Resume from the newest good checkpoint of the run folder; start a new run if there is none."""
    resume_from: Path | None = None
    """Resume from this checkpoint, or from the newest good one of this folder; wins over `resume`."""
    init_from: Path | None = None
    """Start at step 0 with the weights of this checkpoint, or of the newest good one of this run folder; not used when
    the run resumes."""
    clear_halt: bool = False
    """Move an existing `.HALT` file aside instead of refusing to start."""
    allow: tuple[str, ...] = ()
    """Preflight rules that this run may break."""

    @property
    def resuming(self) -> bool:
        return self.resume or self.resume_from is not None

    def require_folders(self, run_folder: Path) -> None:
        """Refuse a --resume-from that does not exist, and an --init-from without weights, unless the run resumes. Files
        are not opened."""
        self._require_resume_folder()
        starts_new = not self.resuming or not (
            self.resume_from or CheckpointFolder(run_folder / names.CHECKPOINTS).steps()
        )
        if self.init_from is None or not starts_new or is_exported_folder(self.init_from):
            return
        source = resolve_links(self.init_from)
        if names.step_of(source.name) is None and not (source / names.COMMIT).exists():
            open_folder(self.init_from).require_steps()
        elif not source.is_dir():
            raise CheckpointError(f"--init-from is {self.init_from}, which does not exist. Name a run or a checkpoint.")

    def _require_resume_folder(self) -> None:
        path = self.resume_from
        if path is None or path.is_dir():
            return
        there = sorted((step, each.name) for each in path.parent.glob("*") if (step := names.step_of(each.name)))
        beside = f" {path.parent} holds {', '.join(name for _, name in there)}." if there else ""
        raise CheckpointError(
            f"--resume-from is {path}, which is not a folder: there is nothing to resume from.{beside} Name a run "
            f"folder or a checkpoint in it."
        )

    def to_args(self) -> list[str]:
        """Arguments of `nsa train` that give the same options."""
        return [
            *(["--resume"] if self.resume else []),
            *(["--resume-from", str(self.resume_from)] if self.resume_from is not None else []),
            *(["--init-from", str(self.init_from)] if self.init_from is not None else []),
            *(["--clear-halt"] if self.clear_halt else []),
            *(f"--allow={rule}" for rule in self.allow),
        ]

    def without_clear_halt(self) -> "StartOptions":
        """For ranks under a launcher, which clears the file once: a `.HALT` that appears later, before a restart
        included, must stop the run.
        """
        return replace(self, clear_halt=False)

    def joining_resumed_run(self) -> "StartOptions":
        """For a rank whose command line starts a new run, among ranks that resume theirs."""
        return replace(self, resume=True, resume_from=None)

    def for_restart(self) -> "StartOptions":
        """After a cycle of ranks that left a checkpoint in the run folder."""
        return replace(self, resume=True, resume_from=None, init_from=None)
