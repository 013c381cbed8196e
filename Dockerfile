# spmoe on a CUDA base image; docs/docker.md explains how to build and run it.
# PyTorch's wheels bring the CUDA libraries and Triton's compiler, so the smallest base image is enough.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04

# gcc and python3-dev: Triton compiles a small launcher for each kernel when it is first used
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/spmoe
ENV PATH=/opt/spmoe/bin:$PATH

# dependencies first, with an empty package: these large layers stay cached while the source changes
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch>=2.11"
COPY pyproject.toml README.md LICENSE /opt/source/
RUN mkdir -p /opt/source/src/spmoe && touch /opt/source/src/spmoe/__init__.py \
    && pip install --no-cache-dir "/opt/source[report]"
COPY src /opt/source/src
RUN pip install --no-cache-dir --no-deps --force-reinstall /opt/source

# models and converted experts belong on volumes: they are large, and are used again
ENV HF_HOME=/models SPMOE_HOME=/cache
RUN useradd --create-home --uid 10001 spmoe && install --directory --owner spmoe --group spmoe /models /cache /work
USER spmoe
WORKDIR /work
VOLUME ["/models", "/cache"]

ENTRYPOINT ["spmoe"]
CMD ["--help"]
