# nsa-train for CPUs: docker build -t nsa-train . && docker run --rm nsa-train doctor
# Not for GPUs: see Dockerfile.cuda.
FROM python:3.12.11-slim-bookworm AS development
# g++ compiles the CPU kernels on first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/opt/constraints.txt
COPY constraints.txt /opt/constraints.txt
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0

FROM development AS nsa
COPY packages /opt/nsa-train/packages
# What nsa_train/shipped links to.
COPY configs /opt/nsa-train/configs
RUN pip install /opt/nsa-train/packages/nsa-attention '/opt/nsa-train/packages/nsa-train[train,hf,ops]' && useradd --uid 1000 --create-home nsa
USER 1000
WORKDIR /home/nsa
ENTRYPOINT ["nsa"]
CMD ["--help"]
