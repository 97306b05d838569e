# A node of the substrates `docker` and `kubernetes`: Python, torch (CPU) and this chaoskit. Build it here, and name it
# in a run:
#
#     docker build --tag chaoskit-node .
#     pytest --chaos-substrate docker --chaos-docker-image chaoskit-node suites/smoke
#
# It must hold the same version of chaoskit as the launcher, and whatever a job imports. Without an image, containers see
# the launcher's own Python through read-only mounts, and none of this is needed.
ARG PYTHON=3.13
FROM python:${PYTHON}-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

# Torch first: it is large and changes seldom. Its builds for CPUs only are much smaller; say where pip finds them, as in
# `--build-arg TORCH_OPTIONS="--index-url URL"`.
ARG TORCH_OPTIONS=""
COPY constraints.txt /tmp/
RUN python3 -m pip install --constraint /tmp/constraints.txt ${TORCH_OPTIONS} torch

COPY . /tmp/chaoskit
RUN python3 -m pip install --constraint /tmp/constraints.txt '/tmp/chaoskit[jobs,kubernetes]' \
    && rm -rf /tmp/chaoskit /tmp/constraints.txt \
    && python3 -c 'import chaoskit.runtime.worker.process, chaoskit.substrate.supervisor.server'
