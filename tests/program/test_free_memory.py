"""What is free: the host's or the container's share on CPU, the allocator's limit on an accelerator."""

from __future__ import annotations

import jax
import pytest

from ninfer_jax.program import free_memory


def write_cgroup(folder, *, limit: str, current: int, cached: int):
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(current))
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nactive_file 5\n")
    return folder


def test_host_memory_is_positive_and_no_more_than_the_machine_has():
    import psutil

    assert 0 < free_memory.free_device_bytes(jax.devices("cpu")[0]) <= psutil.virtual_memory().total


def test_a_containers_limit_counts_and_its_page_cache_gives_way(tmp_path):
    folder = write_cgroup(tmp_path, limit="1000", current=700, cached=95)
    assert free_memory._container_free_bytes(folder) == 1000 - 700 + 95 + 5


def test_a_container_over_its_limit_has_nothing(tmp_path):
    assert free_memory._container_free_bytes(write_cgroup(tmp_path, limit="10", current=700, cached=0)) == 0


@pytest.mark.parametrize("limit", ["max", "nonsense"])
def test_without_a_limit_the_container_says_nothing(tmp_path, limit):
    assert (
        free_memory._container_free_bytes(write_cgroup(tmp_path, limit=limit, current=1, cached=0)) > 1 << 60
    )


def test_an_accelerator_is_asked_for_its_allocator():
    class Accelerator:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 300}

    assert free_memory.free_device_bytes(Accelerator()) == 700
