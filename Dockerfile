# An image of the service. It is for CPUs by default, and for CUDA if TORCH_INDEX is an index of CUDA builds of torch.
# Only an image for CUDA has a compiler, for C, which Triton needs. A change of the service builds the last layer alone.
ARG BASE=python:3.11.14-slim-bookworm

# The dependencies change rarely: torch from its index, then the others.
FROM ${BASE} AS dependencies
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
RUN python -m venv /opt/forwardscope
ENV PATH=/opt/forwardscope/bin:$PATH
COPY pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && grep '^torch' requirements.txt > torch.txt \
    && pip install --index-url "${TORCH_INDEX}" --requirement torch.txt \
    && pip install --requirement requirements.txt \
    && rm -r /opt/forwardscope/lib/python*/site-packages/torch/test

# The wheel. Its kernels are compiled before the rest is copied, so that only their own files compile them again.
FROM ${BASE} AS wheel
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 KERNEL_LEVELS=all
WORKDIR /build
RUN python -m venv /opt/build
ENV PATH=/opt/build/bin:$PATH
COPY model/ops/cpu/build.py model/ops/cpu/instruction_levels.py model/ops/cpu/
RUN pip install "$(python -c 'from model.ops.cpu.build import ZIG; print(ZIG)')" "setuptools>=77"
COPY model/ops/cpu/csrc model/ops/cpu/csrc
RUN python -m model.ops.cpu.build --all build/lib/model/ops/cpu/libraries
COPY pyproject.toml README.md LICENSE ./
COPY forwardscope forwardscope
COPY model model
COPY service service
RUN pip wheel --no-build-isolation --no-deps --wheel-dir /wheels .

FROM dependencies AS package
COPY --from=wheel /wheels /wheels
RUN pip install --no-deps --prefix /package /wheels/forwardscope-*.whl

FROM dependencies
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN case "${TORCH_INDEX}" in */cpu) ;; *) \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -r /var/lib/apt/lists/* ;; \
    esac
# /cache keeps the checkpoints that are downloaded from the hub, the formats that `--quantize auto` has chosen, and what
# Triton has compiled. Nothing else is written. It belongs to the group 0, so that any user of this group can run the
# service (OpenShift).
RUN useradd --uid 10001 --gid 0 --no-create-home --home-dir /cache forwardscope \
    && install --directory --owner=10001 --group=0 --mode=0775 /cache
ENV HOME=/cache \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    FORWARDSCOPE_HOST=0.0.0.0 \
    FORWARDSCOPE_PORT=8000
WORKDIR /cache
USER 10001:0
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(f'http://localhost:{os.environ[\"FORWARDSCOPE_PORT\"]}/ready', timeout=4)"]
ENTRYPOINT ["forwardscope"]
# The code is last, so that a change of it repeats this line alone.
COPY --from=package /package /opt/forwardscope
