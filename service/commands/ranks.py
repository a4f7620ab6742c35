"""The processes of `forwardscope serve --tensor-parallel N`: connect them, and run those that do not serve."""

import logging
import shlex
import signal
from collections.abc import Mapping, Sequence

from model.engine.tensor_parallel.follower import Follower
from model.network.ranks import LostRank, Place, Ranks
from service.loading import device_of, load_model, num_threads, set_num_threads
from service.settings import Settings

logger = logging.getLogger(__name__)


def find_place(settings: Settings, arguments: Sequence[str], environment: Mapping[str, str]) -> Place | None:
    """The place of this process among those that compute the network; None if it computes all of it.

    Raises `ValueError` with the command to run if `torchrun` has not started as many processes as the settings ask for.
    """
    place, size = Place.of_environment(environment), settings.tensor_parallel
    if (1 if place is None else place.size) == size:
        return place if size > 1 else None
    found = "torchrun has not started this one" if place is None else f"torchrun has started {place.size}"
    if size == 1:
        assert place is not None
        raise ValueError(
            f"torchrun has started {place.size} processes, but tensor_parallel is 1; add --tensor-parallel "
            f"{place.size}, or start the service without torchrun"
        )
    command = f"torchrun --standalone --nproc-per-node {size} -m service serve {shlex.join(arguments)}"
    raise ValueError(f"tensor_parallel: {size} needs {size} processes, but {found}; run: {command}")


def connect_ranks(settings: Settings, arguments: Sequence[str], environment: Mapping[str, str]) -> Ranks | None:
    """Connect with the other processes that compute the network; None if there are none.

    Raises `ValueError` as `find_place` does or for a device that cannot be used, and `LostRank` if a process does not
    connect.
    """
    place = find_place(settings, arguments, environment)
    return None if place is None else Ranks(place, device_of(settings))


def follow(settings: Settings, ranks: Ranks) -> int:
    """Compute a share of the network, as rank 0 asks for it. Returns the exit status when rank 0 has ended.

    The signals that end rank 0 are ignored, so that it can answer its last requests.
    """
    set_num_threads(num_threads(settings))
    try:
        checkpoint = load_model(settings, ranks)
        assert checkpoint is not None, "the settings refuse to serve no model"
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        Follower(checkpoint.model, ranks).run()
    except LostRank as error:
        logger.error("%s", error)
        return 1
    except (ValueError, OSError) as error:
        logger.error("cannot compute a share of %s: %s", settings.model, error)
        return 1
    finally:
        ranks.disconnect()
    return 0
