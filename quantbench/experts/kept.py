"""Counts of experts in the cache folder, where commands look for those of a model.

keep(popularity)                # quantbench experts profile, without --output
find(routers)                   # --expert_placement popularity
"""

from pathlib import Path

from quantbench.errors import LogError, UsageError
from quantbench.experts.popularity import Popularity, Routers
from quantbench.files import cache_folder, named


def path_of(routers: Routers) -> Path:
    """The file for a model's counts. A quantized or shortened copy of the model has the same."""
    digest = next((digest for digest in routers.digests if digest), "unread")
    return cache_folder() / "popularity" / f"{digest}.json"


def keep(popularity: Popularity) -> Path:
    """Write the counts of their model, in place of older ones. Raises LogError, one line."""
    path = path_of(popularity.routers)
    with named("", path.parent, LogError):
        path.parent.mkdir(parents=True, exist_ok=True)
    popularity.save("", path)
    return path


def find(routers: Routers, option: str) -> Popularity:
    """The counts of this model. Raises UsageError where none are kept.

    option: what asked for them, for the message.
    """
    path = path_of(routers)
    if not path.exists():
        raise UsageError(
            f"{option}: the cache folder has no counts of {routers.model}'s experts; write them "
            "with quantbench experts profile --checkpoint_path …"
        )
    return Popularity.load(option, path).of_model(routers, option, str(path))
