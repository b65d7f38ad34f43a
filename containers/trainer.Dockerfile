# The training worker, on a CPU: docker build -f containers/trainer.Dockerfile .
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
# The same number as the server's: both read and write the adapters' folder.
RUN ["useradd", "--uid", "10001", "--no-create-home", "--home-dir", "/data", "--shell", "/usr/sbin/nologin", "whetstone"]
RUN ["install", "-d", "-o", "10001", "-g", "10001", "-m", "0700", "/data"]
COPY --from=build /app /app
ENV PATH=/app/.venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    WHETSTONE_DATA=/data \
    WHETSTONE_LOG__FORMAT=json
WORKDIR /data
VOLUME /data
USER 10001:10001
# It listens nowhere: that it reaches the database is what can be asked.
HEALTHCHECK --interval=60s --timeout=30s --start-period=120s --retries=3 \
    CMD ["whetstone", "sql", "SELECT 1"]
STOPSIGNAL SIGTERM
CMD ["celery", "-A", "trainer.tasks", "--quiet", "worker", "--queues", "trainer", "--pool", "solo"]
