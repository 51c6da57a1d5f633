"""What a run asks of the number of ranks. Needs no engine, so that it can be checked before any rank starts."""

from nsa.config.schema import RunConfig
from nsa.errors import ConfigError
from nsa.train.distributed import RankInfo


def check(config: RunConfig, ranks: RankInfo) -> None:
    """What only shows once the number of ranks is known."""
    train, parallel = config.train, config.parallel
    if train.batch_size % ranks.world:
        fitting = -(-train.batch_size // ranks.world) * ranks.world
        raise ConfigError(
            f"train.batch_size ({train.batch_size}) must be a multiple of the number of ranks ({ranks.world}): every "
            f"rank takes the same number of rows. Set e.g. train.batch_size={fitting}."
        )
    if parallel.data == "hsdp" and ranks.world % (parallel.shard_ranks or ranks.local_world):
        raise ConfigError(
            f"parallel.shard_ranks ({parallel.shard_ranks}) must divide the number of ranks ({ranks.world}): hsdp "
            f"makes groups of that size. Set e.g. parallel.shard_ranks={ranks.local_world}."
        )
    if train.replica_check_every and parallel.data == "fsdp" and ranks.world > 1:
        raise ConfigError(
            f"train.replica_check_every is {train.replica_check_every} and parallel.data is fsdp: every rank holds "
            f"another part of the weights there, so nothing can be compared. Set train.replica_check_every=0."
        )
