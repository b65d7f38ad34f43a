"""Post a thumb, a reward or the right answer: python feedback.py chatcmpl-4f1c --thumbs up --comment brief"""

import argparse
import os
import sys
from typing import Any

import httpx


def post(base_url: str, api_key: str, feedback: dict[str, Any]) -> dict[str, Any]:
    """Post one feedback; return its id, and whether its target is known yet."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    answer = httpx.post(f"{base_url.rstrip('/')}/feedback", json=feedback, headers=headers, timeout=30)
    if answer.is_error:
        sys.exit(f"{answer.status_code}: {answer.text}")
    receipt: dict[str, Any] = answer.json()
    return receipt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="The API key is read from WHETSTONE_API_KEY.")
    parser.add_argument("id", help="the answer's own id or X-Completion-Id; with --trajectory, X-Trajectory-Id")
    parser.add_argument("--trajectory", action="store_true", help="rate the whole attempt, which ends it")
    value = parser.add_mutually_exclusive_group()
    value.add_argument("--thumbs", choices=["up", "down"])
    value.add_argument("--reward", type=float, metavar="NUMBER")
    parser.add_argument("--right-answer", dest="demonstration", metavar="TEXT", help="alone, or beside a value")
    parser.add_argument("--comment", metavar="TEXT")
    parser.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    args = parser.parse_args()
    names = ("thumbs", "reward", "demonstration", "comment")
    feedback = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    feedback["trajectory_id" if args.trajectory else "completion_id"] = args.id
    print(post(args.base_url, os.environ.get("WHETSTONE_API_KEY", ""), feedback))


if __name__ == "__main__":
    main()
