# A node of the substrates `docker` and `kubernetes`: Python, torch (CPU) and this chaoskit. Build it here, and name it
# in a run:
#
#     docker build --tag chaoskit-node .
#     pytest --chaos-substrate docker --chaos-docker-image chaoskit-node suites/smoke
#
# It must hold the same version of chaoskit as the launcher, and whatever a job imports. Without an image, containers see
# the launcher's own Python through read-only mounts, and none of this is needed.
ARG PYTHON=3.13
ARG HAND_BASE=python:${PYTHON}-slim

# The hand, which acts on pods that chaoskit did not start: an image without torch and without chaoskit, for ephemeral
# containers. Its base lends Debian's nft and tc, and Python; the image has only the files that the hand needs.
#
#     docker build --target hand --tag chaoskit-hand .
FROM ${HAND_BASE} AS hand-files
RUN apt-get update && apt-get install --yes --no-install-recommends nftables iproute2
COPY deploy/hand/collect.sh /tmp/
COPY chaoskit/hand /tmp/hand
RUN mkdir /files && PYTHONDONTWRITEBYTECODE= sh /tmp/collect.sh /files /tmp/hand

FROM scratch AS hand
COPY --from=hand-files /files /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONUNBUFFERED=1
ENTRYPOINT ["python3", "-m", "hand"]

FROM python:${PYTHON}-slim AS node

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
