"""How many threads, and where: cores that count, containers' quotas and variables.
Machines are files in a folder."""

import pytest

from quantbench import host
from quantbench.environment import choose_threads as choose
from quantbench.errors import UsageError

EIGHT = range(8)


PAIRS = {number: f"{number % 4},{number % 4 + 4}" for number in EIGHT}


@pytest.mark.parametrize(
    ("siblings", "allowed", "expected"),
    [
        ({}, EIGHT, 8),
        (PAIRS, EIGHT, 4),
        (PAIRS, [0, 4], 1),
        (PAIRS, [0, 1, 4], 2),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, [0, 1, 2, 3], 2),
        ({0: "0", 1: "1"}, [1], 1),
    ],
)
def test_cores_of_the_affinity_mask_count_once(kernel_files, siblings, allowed, expected):
    path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    kernel_files({path.format(number): text for number, text in siblings.items()})
    assert host.cores(allowed) == expected


INTEL, CAPACITY = "sys/devices/cpu_{}/cpus", "sys/devices/system/cpu/cpu{}/cpu_capacity"
KINDS = [  # fast cores, then the kernel's files
    (4, {INTEL.format("core"): "0-3", INTEL.format("atom"): "4-7"}),
    (5, {INTEL.format("core"): "0,2-5", INTEL.format("atom"): "6-7"}),
    (8, {INTEL.format("core"): "0-7"}),
    # the affinity mask has slow ones alone
    (8, {INTEL.format("core"): "8-11", INTEL.format("atom"): "0-7"}),
    (4, {CAPACITY.format(n): 1024 if n == 7 else 870 if n > 3 else 325 for n in EIGHT}),
    (8, {CAPACITY.format(n): 1024 for n in EIGHT}),
]


@pytest.mark.parametrize(("expected", "files"), KINDS)
def test_slow_cores_beside_fast_ones_do_not_count(kernel_files, expected, files):
    kernel_files(files)
    assert host.cores(EIGHT) == expected and host.cores(EIGHT, physical=False) == 8


GROUP, CPU = "sys/fs/cgroup", "sys/fs/cgroup/cpu"  # of version 2 and of version 1
QUOTAS = [  # cores, then the kernel's files
    (8, {f"{GROUP}/cpu.max": "max 100000"}),
    (3, {f"{GROUP}/cpu.max": "300000 100000"}),
    (3, {f"{GROUP}/cpu.max": "250000 100000"}),
    (1, {f"{GROUP}/cpu.max": "50000 100000"}),
    (8, {f"{GROUP}/cpu.max": "5000000 100000"}),
    (8, {f"{GROUP}/cpu.max": "damaged"}),
    # the process's own group allows 4, the one around it 2
    (2, {"proc/self/cgroup": "0::/a/b", f"{GROUP}/a/b/cpu.max": "400000 100000",
         f"{GROUP}/a/cpu.max": "200000 100000"}),
    (8, {"proc/self/cgroup": "0::/a", f"{GROUP}/b/cpu.max": "100000 100000"}),
    (8, {f"{CPU}/cpu.cfs_quota_us": "-1", f"{CPU}/cpu.cfs_period_us": "100000"}),
    (2, {f"{CPU}/cpu.cfs_quota_us": "150000", f"{CPU}/cpu.cfs_period_us": "100000"}),
    (2, {"proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/docker/1\n0::/",
         f"{CPU},cpuacct/docker/1/cpu.cfs_quota_us": "100000",
         f"{CPU},cpuacct/docker/1/cpu.cfs_period_us": "50000"}),
    # in a container of version 1 the path is the host's, and the mount is the container's group
    (3, {"proc/self/cgroup": "2:cpu:/docker/1", f"{CPU}/cpu.cfs_quota_us": "300000",
         f"{CPU}/cpu.cfs_period_us": "100000"}),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "files"), QUOTAS)
def test_the_quota_of_cpu_time_is_rounded_up(kernel_files, expected, files):
    kernel_files(files)
    assert host.cores(EIGHT) == expected


@pytest.mark.parametrize(
    ("asked", "variables", "count", "recorded"),
    [
        (None, {}, 4, None),
        (3, {}, 3, 3),
        (4, {}, 4, 4),
        (3, {"OMP_NUM_THREADS": "2"}, 3, 3),
        (None, {"OMP_NUM_THREADS": "4"}, 4, None),
        (None, {"OMP_NUM_THREADS": "1"}, 1, 1),
        (None, {"OMP_NUM_THREADS": "2,8"}, 2, 2),
        (None, {"OMP_NUM_THREADS": "none"}, 4, None),
        (None, {"OMP_NUM_THREADS": "0"}, 4, None),
        (None, {"OMP_THREAD_LIMIT": "3"}, 3, 3),
        (None, {"OMP_THREAD_LIMIT": "9"}, 4, None),
        (None, {"OMP_NUM_THREADS": "8", "OMP_THREAD_LIMIT": "2"}, 2, 2),
        (2, {"OMP_THREAD_LIMIT": "2"}, 2, 2),
    ],
)
def test_what_is_chosen_on_four_cores(asked, variables, count, recorded):
    chosen = choose(asked, 4, variables)
    assert (chosen.count, chosen.recorded) == (count, recorded)


def test_the_limit_of_openmp_cannot_be_passed():
    with pytest.raises(UsageError, match="--threads 3 is more than OMP_THREAD_LIMIT=2 allows"):
        choose(3, 4, {"OMP_THREAD_LIMIT": "2"})


@pytest.mark.parametrize(("count", "cores", "said"), [(4, 1, "4 threads on 1 core: slower than 1"),
                                                      (8, 2, "8 threads on 2 cores: slower"),
                                                      (2, 2, None), (1, 2, None)])  # fmt: skip
def test_more_threads_than_cores_are_warned_of(count, cores, said):
    warning = choose(count, cores, {}).warning()
    assert (said is None) == (warning is None) and (said or "") in (warning or "")


def test_where_the_system_does_not_say_torch_decides():
    assert choose(None, None, {}).count is None and choose(None, None, {}).recorded is None
    assert choose(3, None, {}).count == 3 and choose(3, None, {}).warning() is None
