"""The choice of replicas, and their number. These modules import Ray, but need no cluster."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():  # Ray's own classes use a form of pydantic's `Field` that pydantic calls deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    pytest.importorskip("ray.serve", reason="needs the extra `ray`")

from forwardscope_ray.app import Arguments, build, resources
from forwardscope_ray.router import KnownBlocks, rank
from forwardscope_ray.scaling import replicas_for_load
from pydantic import ValidationError

from service.settings import Settings

FIRST, SECOND, THIRD = ((11, 12, 13), (11, 12, 23), (31, 32, 33))


def known(*blocks: tuple[int, ...]) -> KnownBlocks:
    result = KnownBlocks()
    for each in blocks:
        result.add(each)
    return result


def ranked(blocks: tuple[int, ...], loads: dict[Any, int], **of: KnownBlocks) -> list[str]:
    return [str(name) for name in rank(blocks, loads, {name: of.get(name, KnownBlocks()) for name in loads}, 8)]


def test_the_replica_that_knows_the_longest_part_of_a_prompt_is_first() -> None:
    loads = {"a": 3, "b": 0, "c": 0}
    assert ranked(SECOND, loads, a=known(FIRST), b=known(THIRD))[0] == "a"
    assert ranked(FIRST, loads, a=known(FIRST), b=known(SECOND))[0] == "a"


def test_a_replica_with_eight_more_requests_than_another_is_not_preferred() -> None:
    assert ranked(FIRST, {"a": 7, "b": 0}, a=known(FIRST)) == ["a", "b"]
    assert ranked(FIRST, {"a": 8, "b": 0}, a=known(FIRST)) == ["b", "a"]


def test_an_unknown_prompt_goes_to_the_idler_of_two_replicas() -> None:
    assert ranked(THIRD, {"a": 2, "b": 1}, a=known(FIRST)) == ["b", "a"]


def test_the_block_used_least_recently_is_forgotten_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    blocks = KnownBlocks(max_blocks=4)
    blocks.add(FIRST)
    blocks.add(THIRD)
    assert (blocks.match(FIRST), blocks.match(THIRD)) == (1, 3)


def load(replicas: int, waiting: float, running: float) -> int:
    """The number of replicas for a load. Each can run 10 requests at a time."""
    figures = {"waiting": {"a": waiting}, "running": {"a": running}, "capacity": {"a": 10.0, "b": 10.0}}
    context: Any = SimpleNamespace(target_num_replicas=replicas, aggregated_metrics=figures)
    return replicas_for_load(context)[0]


def test_replicas_are_added_while_requests_wait_and_removed_when_the_others_suffice() -> None:
    assert load(2, waiting=1, running=20) == 3
    assert load(2, waiting=25, running=20) == 5
    assert load(2, waiting=0, running=15) == 2
    assert load(4, waiting=0, running=13) == 2
    assert load(2, waiting=0, running=0) == 1


def test_the_number_of_replicas_stays_until_one_has_reported() -> None:
    context: Any = SimpleNamespace(target_num_replicas=3, aggregated_metrics={})
    assert replicas_for_load(context) == (3, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replica": 2}, "replica\n"),
        ({"settings": {"modle": "bundled"}}, "modle"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas: 2 is less than replicas, 3"),
        ({"settings": {"port": 80}}, "port has no effect behind Ray, so leave it out; set http_options.port"),
        (
            {"settings": {"tensor_parallel": 2}, "cpus": 0},
            "cpus: with tensor_parallel, each process must reserve a CPU",
        ),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Arguments(**arguments)


def test_resources_are_reserved_for_every_process_of_a_replica() -> None:
    own = {"ray_actor_options": {"num_cpus": 4, "num_gpus": 1}}
    arguments = Arguments(cpus=4, gpus=1)
    assert resources(arguments, Settings()) == own
    bundles = {"placement_group_bundles": [{"CPU": 4, "GPU": 1}] * 3, "placement_group_strategy": "PACK"}
    assert resources(arguments, Settings(tensor_parallel=3)) == own | bundles


def test_the_application_is_an_ingress_in_front_of_replicas() -> None:
    application = build(Arguments(replicas=2, max_replicas=4, settings={"cors_origin": "https://example.org"}))
    assert application._bound_deployment.name == "Ingress"
