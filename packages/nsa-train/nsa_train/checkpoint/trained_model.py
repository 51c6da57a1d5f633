"""Opens a run folder or a checkpoint for use outside training: verified weights, settings, record and tokenizer.

Exports, generation and runs that start from existing weights all read a model through `open_trained_model`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from torch import Tensor

from nsa.errors import CheckpointError, NSAError
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFinding, open_folder, resolve_links
from nsa_train.checkpoint.load import VerifiedFiles, read_model, read_record, require_trustworthy
from nsa_train.checkpoint.run_state import TOKENIZER_RECORD, VOCAB_SIZE, RunRecord
from nsa_train.config.schema import RunConfig

if TYPE_CHECKING:  # needs numpy, which `nsa checkpoint` does without
    from nsa_train.data.tokenizer import Tokenizer

_EMBEDDING = "embeddings.weight"


@dataclass(frozen=True)
class TrainedModel:
    """A verified checkpoint. Its tensors are read when `tensors` is first used, every byte verified."""

    files: VerifiedFiles
    record: RunRecord
    config: RunConfig

    @property
    def path(self) -> Path:
        return self.files.path

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters by the names of `NSATransformer`, in the dtype they were saved in (fp32 for a run)."""
        return read_model(self.files)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; raises CheckpointError if state.json says another number."""
        stated = self.config.model.vocab_size or self.record.more.get(VOCAB_SIZE)
        embedding = self.tensors.get(_EMBEDDING)
        if embedding is None or embedding.dim() != 2 or stated not in (None, embedding.shape[0]):
            shape = None if embedding is None else tuple(embedding.shape)
            raise CheckpointError(
                f"{self.path} has a vocabulary of {stated} in {names.STATE} and {_EMBEDDING} of shape {shape}: they "
                f"belong to different models. Use another checkpoint."
            )
        return int(embedding.shape[0])

    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer saved with the checkpoint; None if there is none."""
        from nsa_train.data.tokenizer import LARGEST_TOKENIZER_BYTES, parse_saved

        if names.TOKENIZER not in self.files.sizes:
            return None
        raw = self.files.read(names.TOKENIZER, limit=LARGEST_TOKENIZER_BYTES)
        record = self.record.more.get(TOKENIZER_RECORD)
        where = self.path / names.TOKENIZER
        return parse_saved(raw, where, record if isinstance(record, dict) else {})


def open_trained_model(
    path: Path, *, key: bytes | None = None, on_rejected: Callable[[CheckpointFinding], None] = lambda finding: None
) -> TrainedModel:
    """Verify a checkpoint, or the newest good one of a run folder; nothing in it is executed."""
    checkpoint = find_checkpoint(path, key=key, on_rejected=on_rejected)
    files = require_trustworthy(checkpoint, key=key, deep=False)
    record = read_record(files)
    if record is None:
        raise CheckpointError(
            f"{checkpoint} has no {names.STATE}, so the settings of its model are not known. Use a checkpoint that "
            f"`nsa train` saved."
        )
    try:
        config = RunConfig.of_saved(record.config)
    except (ValidationError, NSAError) as error:
        raise CheckpointError(
            f"{checkpoint / names.STATE} holds settings that this version cannot use: {error}. Use the version that "
            f"saved it."
        ) from error
    return TrainedModel(files, record, config)


def find_checkpoint(
    path: Path, *, key: bytes | None = None, on_rejected: Callable[[CheckpointFinding], None] = lambda finding: None
) -> Path:
    """A checkpoint itself, or the newest good one of a run folder or of its checkpoints folder, fully verified."""
    source = resolve_links(path)
    if names.step_of(source.name) is not None or (source / names.COMMIT).exists():
        return source
    newest = open_folder(path, key=key).find_resumable(
        lambda checkpoint: require_trustworthy(checkpoint, key=key, deep=False)
    )
    for finding in newest.passed_over:
        on_rejected(finding)
    if newest.path is None:
        raise CheckpointError(f"{path} holds no good checkpoint. `nsa checkpoint ls {path}` shows what there is.")
    return newest.path
