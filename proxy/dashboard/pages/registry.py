"""All pages and actions of the dashboard, and the navigation."""

from proxy.dashboard.interfaces import Action, Page
from proxy.dashboard.pages import compare, feedback, funnel, groups, keys, live, policies, ratings, trajectories

_POLICY = "/ui/policies/{policy}"

PAGES = (
    Page("/ui/policies", "policies.html", policies.policies),
    Page(_POLICY, "policy.html", policies.policy),
    Page(f"{_POLICY}/steps/{{number}}", "step.html", policies.step),
    Page("/ui/live", "live.html", live.live),
    Page("/ui/groups", "groups.html", groups.groups),
    Page("/ui/groups/{group_id}", "group.html", groups.group),
    Page("/ui/trajectories", "search.html", trajectories.search),
    Page("/ui/trajectories/{trajectory_id}", "trajectory.html", trajectories.trajectory),
    Page("/ui/funnel", "funnel.html", funnel.why_not_trained),
    Page("/ui/feedback", "feedback.html", feedback.feedback),
    Page("/ui/feedback/{feedback_id}", "feedback_one.html", feedback.one_feedback),
    Page("/ui/reviews", "reviews.html", feedback.reviews),
    Page("/ui/rate", "rate.html", ratings.queue),
    Page("/ui/rate/raters", "raters.html", ratings.raters),
    Page("/ui/compare", "compare.html", compare.form),
    Page("/ui/compare/{comparison_id}", "comparison.html", compare.comparison),
    Page("/ui/keys", "keys.html", keys.keys),
)
ACTIONS = (
    Action(f"{_POLICY}/state", policies.set_state, _POLICY),
    Action(f"{_POLICY}/promote", policies.promote, _POLICY),
    Action(f"{_POLICY}/rollback", policies.roll_back, _POLICY),
    Action(f"{_POLICY}/pin", policies.pin, _POLICY),
    Action(f"{_POLICY}/step", policies.request_step, _POLICY),
    Action("/ui/reviews/{trajectory_id}", feedback.review, "/ui/reviews"),
    Action("/ui/rate/name", ratings.set_name, "/ui/rate"),
    Action("/ui/rate/trajectory/{trajectory_id}", ratings.rate, "/ui/rate"),
    Action("/ui/rate/completion/{completion_id}", ratings.rate, "/ui/rate"),
    Action("/ui/compare/start", compare.start, "/ui/compare"),
    Action("/ui/compare/{comparison_id}/preference/{number}", compare.prefer, "/ui/compare/{comparison_id}"),
)
NAV = (
    ("Overview", "/ui/policies"),
    ("Live", "/ui/live"),
    ("Groups", "/ui/groups"),
    ("Trajectories", "/ui/trajectories"),
    ("Why not trained", "/ui/funnel"),
    ("Feedback", "/ui/feedback"),
    ("Compare", "/ui/compare"),
    ("Rate", "/ui/rate"),
    ("Reviews", "/ui/reviews"),
    ("Keys and costs", "/ui/keys"),
)
"""Links in the navigation: label and path."""
