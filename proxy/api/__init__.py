"""Serve the routes beside inference: feedback, trajectories, groups, health, administration.

`project` has a project's routes, `responses` those of stored responses, `admin` those of administrators, `health` those
of the whole proxy. Feedback goes through `feedback_ingest`, which gives it to the folder recording; `feedback_page`
serves what web pages need to send it. `bodies` reads the bodies of admins' requests and builds answers, `version_moves`
moves versions, `openapi` is the document.
"""
