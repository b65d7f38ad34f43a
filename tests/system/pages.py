"""The pages that Chromium clicks through: each with its heading. A page that is served and not here fails a test."""

from dataclasses import dataclass

from tests.unit.proxy.ui_scene import COMPARISON


@dataclass(frozen=True)
class Visit:
    """A page as a visitor comes to it."""

    url: str
    heading: str
    page: str
    """Its path in `proxy.dashboard.pages.registry`."""


VISITS = (
    Visit("/ui/policies", "Overview", "/ui/policies"),
    Visit("/ui/policies/agent", "agent", "/ui/policies/{policy}"),
    Visit("/ui/policies/agent/steps/12", "Step 12", "/ui/policies/{policy}/steps/{number}"),
    Visit("/ui/live", "Live", "/ui/live"),
    Visit("/ui/groups", "Groups", "/ui/groups"),
    Visit("/ui/groups/trains-17", "trains-17", "/ui/groups/{group_id}"),
    Visit("/ui/trajectories", "Trajectories", "/ui/trajectories"),
    Visit("/ui/trajectories/agent", "agent", "/ui/trajectories/{trajectory_id}"),
    Visit("/ui/trajectories/long", "long", "/ui/trajectories/{trajectory_id}"),
    Visit("/ui/trajectories/hostile", "hostile", "/ui/trajectories/{trajectory_id}"),
    Visit("/ui/trajectories?text=arrives", "Trajectories", "/ui/trajectories"),
    Visit("/ui/feedback/f000001", "f000001", "/ui/feedback/{feedback_id}"),
    Visit("/ui/funnel", "Why not trained", "/ui/funnel"),
    Visit("/ui/feedback", "Feedback", "/ui/feedback"),
    Visit("/ui/reviews", "Reviews", "/ui/reviews"),
    Visit("/ui/compare", "Compare", "/ui/compare"),
    Visit("/ui/compare?trajectory=agent&turn=1", "Compare", "/ui/compare"),
    Visit(f"/ui/compare/{COMPARISON}", "starter@v0 and starter", "/ui/compare/{comparison_id}"),
    Visit("/ui/rate", "Rate", "/ui/rate"),
    Visit("/ui/rate/raters", "Raters", "/ui/rate/raters"),
    Visit("/ui/keys", "Keys and costs", "/ui/keys"),
)
