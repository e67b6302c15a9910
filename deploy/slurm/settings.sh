# Read by the jobs in this folder: the places that all nodes share, and the settings of all processes.
# shellcheck shell=bash
: "${SHARED:?set SHARED to a folder on the shared file system}"
: "${MODEL:?set MODEL to a model folder on the shared file system}"
export RUN=${RUN:-run-1}
# The store is one file with a kernel lock: a local disk is faster, and some shared file systems have no locks.
export STORE=${STORE:-$SHARED/store/spans.duckdb}
export PATH=$SHARED/venv/bin:$PATH
export TRAINSPAN_HOME=$SHARED/state
export TRAINSPAN_SERVING__CHECKPOINTS=$SHARED/checkpoints TRAINSPAN_TRAIN__CHECKPOINTS=$SHARED/checkpoints
export TRAINSPAN_DATASET__OUT=$SHARED/dataset
export OTEL_EXPORTER_OTLP_CERTIFICATE=$SHARED/secrets/runner/ca.crt
umask 077

# Waits until the services' job has written their host, and they answer there: a job that was killed leaves its host behind.
use_services() {
    until [ -s "$SHARED/services/host" ] && SERVICES=$(cut -d ' ' -f 1 "$SHARED/services/host") &&
        python "$DEPLOY/containers/probe.py" 8000 /health "$SERVICES"; do
        sleep 5
    done
    export SERVICES SSL_CERT_FILE=$SHARED/secrets/runner/trust.pem
    export TRAINSPAN_COLLECTOR__ENDPOINTS=https://$SERVICES:4317 TRAINSPAN_COLLECTOR__STORES=grpc+tls://$SERVICES:4319
    export TRAINSPAN_ROLLOUTS__POLICY_URL=https://$SERVICES:8000/v1
    export TRAINSPAN_TRAIN__POLICY_URL=https://$SERVICES:8000
}
