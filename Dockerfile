# syntax=docker/dockerfile:1
# An image of the service. It is for CPUs by default, and for CUDA if TORCH_INDEX is an index of CUDA builds of torch.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/forwardscope
ENV PATH=/opt/forwardscope/bin:$PATH
# The kernels for every set of vector instructions. The container chooses by its CPU, and needs no compiler. Only these
# files decide what is compiled, so other changes leave this layer, which takes minutes, as it is.
COPY model/ops/cpu/build.py model/ops/cpu/instruction_levels.py model/ops/cpu/
COPY model/ops/cpu/csrc model/ops/cpu/csrc
RUN python -m model.ops.cpu.build --all /opt/forwardscope/kernels
# The dependencies change rarely, so they are a layer of their own: torch from its index, then the others.
COPY pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && grep '^torch' requirements.txt > torch.txt \
    && pip install --index-url "${TORCH_INDEX}" --requirement torch.txt \
    && pip install --requirement requirements.txt \
    && rm -r /opt/forwardscope/lib/python*/site-packages/torch/test
COPY README.md LICENSE ./
COPY forwardscope forwardscope
COPY model model
COPY service service
RUN pip install --no-deps .

FROM ${BASE}
RUN useradd --uid 10001 --no-create-home --home-dir /cache forwardscope \
    && install --directory --owner=forwardscope --group=forwardscope /cache
COPY --from=build /opt/forwardscope /opt/forwardscope
# /cache keeps the checkpoints that are downloaded from the hub, and the formats that `--quantize auto` has chosen.
# Nothing else is written.
ENV PATH=/opt/forwardscope/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache/huggingface \
    KERNEL_LIBRARIES=/opt/forwardscope/kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    FORWARDSCOPE_HOST=0.0.0.0 \
    FORWARDSCOPE_PORT=8000
WORKDIR /cache
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --start-interval=1s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(f'http://localhost:{os.environ[\"FORWARDSCOPE_PORT\"]}/ready', timeout=4)"]
ENTRYPOINT ["forwardscope"]
