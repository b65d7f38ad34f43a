# The proxy, and with another command the judging worker: docker build -f containers/server.Dockerfile .
# PIP_EXTRA_INDEX_URL (--build-arg) names an index with PyTorch's CPU wheel, whose hash the lock has.
FROM python:3.11.13-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /app
RUN ["python", "-m", "venv", "/app/.venv"]
# What changes rarely comes first: a change of ours leaves the packages' layer as it is.
COPY requirements/cpu.lock requirements/cpu.lock
RUN ["/app/.venv/bin/python", "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "--no-deps", \
     "--require-hashes", "-r", "requirements/cpu.lock"]
COPY pyproject.toml README.md LICENSE ./
COPY proxy proxy
COPY judge judge
COPY trainer trainer
COPY migrations migrations
COPY whetstone whetstone
COPY examples/starter/model examples/starter/model
RUN ["/app/.venv/bin/python", "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "--no-deps", \
     "--no-build-isolation", "-e", "."]

FROM python:3.11.13-slim-bookworm
# The same number wherever it runs, so that a volume's files have one owner; its folder is all that it may write.
RUN ["useradd", "--uid", "10001", "--no-create-home", "--home-dir", "/data", "--shell", "/usr/sbin/nologin", "whetstone"]
RUN ["install", "-d", "-o", "10001", "-g", "10001", "-m", "0700", "/data"]
COPY --from=build /app /app
ENV PATH=/app/.venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    WHETSTONE_DATA=/data \
    WHETSTONE_LOG__FORMAT=json \
    WHETSTONE_PROXY__HOST=0.0.0.0 \
    WHETSTONE_PROXY__PORT=8000
WORKDIR /data
VOLUME /data
EXPOSE 8000
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-P", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
STOPSIGNAL SIGTERM
# The judging worker: celery -A judge.tasks --quiet worker --queues judge --pool threads --concurrency 3
CMD ["python", "-P", "-m", "proxy"]
