"""Names of the files in a run folder, values of a heartbeat's `msg`, and units of its fields."""

ENV = "env.json"
EVENTS = "events.jsonl"
TRAINING_CSV = "training.csv"
VAL_CSV = "val.csv"
METRICS = "metrics.json"
TRACKERS = "trackers.json"
TENSORBOARD = "tb"
CHECKPOINTS = "checkpoints"
DATA_CHECKSUMS = "data_checksums"
DATA_EXCHANGE = "data_exchange"
LATEST = "latest"
MODEL = "model.pt"
MODEL_SAFETENSORS = "model.safetensors"
HALT = ".HALT"
ANOMALY = ".anomaly_type"
GATE_COLLAPSE = "gate_collapse_details.json"
HEALTH_LOG = "health_check.log"
HEARTBEATS = "heartbeat_rank*.jsonl"
STACKDUMPS = "stackdump_*.txt"
COLLECTIVES = "collectives_*.json"


def heartbeat(rank: int) -> str:
    return f"heartbeat_rank{rank}.jsonl"


def stackdump(rank: int, pid: int) -> str:
    return f"stackdump_rank{rank}_{pid}.txt"


def collectives(rank: int, pid: int) -> str:
    """Flight-recorder trace of a rank's process groups, written beside a stack dump."""
    return f"collectives_rank{rank}_{pid}.json"


# Values of a heartbeat's `msg`.
START = "start"
PROGRESS = "progress"
ALIVE = "alive"
"""The run makes progress; written between progress records that are far apart."""
HALTED = "halt"
STOPPED = "stop"
DONE = "done"
FAILED = "error"
SKIPPED = "skipped_step"
ROLLED_BACK = "rollback"

ENDINGS = (HALTED, STOPPED, DONE, FAILED)
"""Final records of a process; one that stops without them hangs or was killed."""

UNITS = {
    "ts": "seconds since 1970",
    "loss": "nats per token",
    "toks_per_s": "tokens per second, all ranks together",
    "step_s": "seconds per optimizer step since the last record",
    "dt_fetch_s": "seconds of waiting for the last batch",
    "gpu_mem_alloc": "MiB",
    "gpu_mem_reserved": "MiB",
    "gpu_mem_alloc_gib": "GiB",
    "gpu_mem_reserved_gib": "GiB",
    "gate_entropy_mean": "nats; ln 3 = 1.0986 is uniform",
    "gate_max_mean": "share of the largest gate",
    "forward_s": "seconds of this rank's own forward passes of the last step, without waiting for other ranks (ddp)",
    "host_mem_rss": "MiB",
    "gate_collapse_frac": "share of the gates (one per layer and head or group)",
    "gate_branch_shares": "shares, in the order compressed, selected, sliding",
    "gate_shares_by_layer": "the same, one triple per layer",
    "sel_k_mean": "tokens per query",
    "sel_k_max": "tokens per query",
    "sel_pct_at_max": "share of the queries; depends on positions only (the last of a block), not on health",
    "reads_pred": "keys, all layers of the last forward pass of this rank",
    "reads_act_total": "keys, all layers of the last forward pass of this rank",
    "tokens_seen": "tokens since step 0, all ranks together",
    "skipped_steps": "steps since step 0 whose optimizer did not run, the non-finite ones included",
    "nonfinite_steps": "steps since step 0 with a loss or gradient norm that is not finite",
}
"""Fields that are not listed are counts or names."""
