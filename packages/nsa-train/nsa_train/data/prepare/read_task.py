"""Reads the documents of one task of `nsa data prepare`, with a report of what was read and skipped."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from nsa.errors import DataError
from nsa_train.data.document import CorruptUnit, Document
from nsa_train.data.prepare.plan import PreparePlan, PrepareTask, open_task
from nsa_train.data.source.kinds import FileKind, file_kind
from nsa_train.data.source.read_report import EMPTY, EMPTY_RECORDS, ReadReport
from nsa_train.data.source.text import UnreadableText


class TaskReader:
    """The documents of one task that have text, in file order. `report` and `bad_units` are filled on the way."""

    def __init__(self, plan: PreparePlan, task: PrepareTask) -> None:
        self._plan = plan
        self._task = task
        self.report = ReadReport()
        self.bad_units: list[str] = []
        self.units_done = 0

    def documents(self) -> Iterator[tuple[FileKind, Document]]:
        plan, task = self._plan, self._task
        scratch = Path(tempfile.gettempdir()) / f"nsa-prepare-{uuid.uuid4().hex}"  # created only if a file is fetched
        try:
            source = open_task(plan, task, scratch, self.report)
            if len(source) < task.stop_unit:
                raise DataError(
                    f"{task.file} has {len(source)} units but had at least {task.stop_unit} when it was listed: the "
                    "source changed. Prepare into another folder."
                )
            if not task.names and task.first_unit == 0:
                self.report.kind(_kind(task.file)).files += 1
            for index in range(task.first_unit, task.stop_unit):
                try:
                    documents = source.read(index)
                except UnreadableText as error:
                    self.report.skip(error.reason, task.names[index])
                    documents = []
                except CorruptUnit as error:
                    self._quarantine(f"{task.file}, {source.unit(index).part}", error)
                    documents = []
                yield from self._with_text(documents, task.names[index] if task.names else None)
                self.units_done += 1
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _with_text(self, documents: list[Document], text_file: str | None) -> Iterator[tuple[FileKind, Document]]:
        """`text_file` is the name of a file that is one document."""
        kind = _kind(text_file or self._task.file)
        for document in documents:
            if document.text:
                self.report.kind(kind).files += text_file is not None
                yield kind, document
            elif text_file is not None:
                self.report.skip(EMPTY, text_file)
            else:
                self.report.skip(EMPTY_RECORDS, document.id)

    def _quarantine(self, unit: str, error: CorruptUnit) -> None:
        self.bad_units.append(unit)
        if len(self.bad_units) > self._plan.max_bad_units:
            raise DataError(
                f"{len(self.bad_units)} unit(s) of one task are corrupt, max_bad_units is {self._plan.max_bad_units}. "
                f"Last: {error}. Download the file again, or raise --max-bad-units to skip such units."
            ) from error


def _kind(name: str) -> FileKind:
    return file_kind(name) or "parquet"  # a URL may end in anything; all of them are parquet
