"""Work of one kernel (FLOPs, exponentials, bytes, launches), and the sizes it is computed from."""

from dataclasses import dataclass

from torch import Tensor

from nsa.bench.case import TORCH_DTYPES, BenchShape
from nsa.errors import ConfigError
from nsa.kernels import triton as backend


@dataclass(frozen=True)
class KernelWork:
    """One kernel of one pass, or the torch operations between two kernels."""

    name: str
    backward: bool
    trips: int = 0
    """Iterations of the kernel's loops over tiles, over all programs."""
    inner_trips: int = 0
    """Those of them that run without masks, in a loop of their own."""
    flops: float = 0.0
    """Operations of the matrix instructions as issued: padding rows and masked keys count, a multiply-add as two."""
    exponentials: float = 0.0
    l2_bytes: float = 0.0
    """All loads and stores of programs; shared tensors count once per program."""
    hbm_bytes: float = 0.0
    """Every tensor once, without cache misses on reuse."""
    shared_bytes: float = 0.0
    """Size of the tensors that programs load repeatedly: what the cache must hold."""
    launches: int = 1
    sorted_keys: float = 0.0
    """Keys that torch sorts in short rows."""
    scanned: float = 0.0
    """Elements of long rows that torch scans with one block: running maxima."""
    programs: Tensor | None = None
    """Work of each program, in any unit, in the order in which they start; None: all alike, and many."""


@dataclass(frozen=True)
class LaunchSizes:
    """A shape at a length, as the launchers see it."""

    shape: BenchShape
    length: int
    dtype: str
    code: str = "sm_80"
    """Architecture whose tile sizes are used, as named in the compile report."""

    def __post_init__(self) -> None:
        s = self.shape
        if max(s.d_k, s.d_v) > backend.WIDEST or s.geometry.n_sel > backend.MOST_BLOCKS:
            raise ConfigError(
                f"--shape has d_k={s.d_k} d_v={s.d_v} n_sel={s.geometry.n_sel}: the Triton kernels take rows of at "
                f"most {backend.WIDEST} and {backend.MOST_BLOCKS} blocks. Use another shape."
            )

    @property
    def element(self) -> int:
        return TORCH_DTYPES[self.dtype].itemsize

    @property
    def rows(self) -> int:
        """Query heads of one group."""
        return self.length * self.shape.heads_per_group

    @property
    def n_compressed(self) -> int:
        return self.shape.geometry.n_compressed(self.length)

    def padded(self) -> tuple[int, int]:
        """Columns of a key and of a value as tiles have them."""
        from nsa.kernels.triton.tuning import widths

        w = widths(self.shape.d_k, self.shape.d_v)
        return w["K1"] + w["K2"], w["V1"] + w["V2"]

    def queries_bytes(self) -> float:
        return self.rows * self.shape.n_kv_groups * self.shape.d_k * self.element

    def outputs_bytes(self) -> float:
        return self.rows * self.shape.n_kv_groups * self.shape.d_v * self.element

    def level_bytes(self) -> float:
        """One fp32 number per query head: log-sum-exp, or delta."""
        return self.rows * self.shape.n_kv_groups * 4

    def key_bytes(self, values: bool = True) -> float:
        """One key of one group, and its value."""
        return (self.shape.d_k + (self.shape.d_v if values else 0)) * self.element
