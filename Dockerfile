# Two images from one file:
#   docker build --target pipeline .     the flow, its tasks and training
#   docker build --target serving  .     vLLM, which the pipeline starts or talks to
# On a CPU host the build needs an index that has torch 2.13.0+cpu: pass it as PIP_EXTRA_INDEX_URL.
FROM python:3.11-slim-bookworm AS base
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 DO_NOT_TRACK=1
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libgomp1 libnuma1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 drafter
WORKDIR /app
COPY --chown=drafter pyproject.toml README.md LICENSE Makefile ./
COPY --chown=drafter speculators ./speculators
COPY --chown=drafter tasks ./tasks
COPY --chown=drafter flows ./flows
RUN chown drafter /app
USER drafter

FROM base AS serving
ARG SERVING_EXTRA=serving-cpu
RUN make .venv-serving/.installed SERVING_EXTRA=$SERVING_EXTRA PYTHON=python3.11

FROM serving AS pipeline
RUN make .venv/.installed PYTHON=python3.11
ENV PATH=/app/.venv/bin:$PATH
ENTRYPOINT ["python", "-m", "flows.retrain"]
