#!/bin/sh
# Renders the chart's defaults into deploy/base, for those who use kustomize or plain manifests, and what needs the Prometheus
# operator into deploy/monitoring; and deploy/install.yaml, one file of all that deploy/base applies. Tests hold them against each
# other. Needs helm.
set -eu
cd "$(dirname "$0")"
render() {
    echo "# Rendered from deploy/chart by deploy/render.sh; do not edit."
    "${HELM:-helm}" template gpu-migrate chart/gpu-migrate --namespace gpu-migrate-system \
        --kube-version 1.33.0 "$@" | grep -v '^# Source: '
}
for part in webhook extender operator bridge templates write-restrictions; do
    render --show-only "templates/$part.yaml" >"base/$part.yaml"
done
mkdir -p monitoring
render --show-only templates/monitoring.yaml --set metrics.podMonitor.enabled=true \
    --set metrics.prometheusRule.enabled=true --set metrics.dashboard.enabled=true >monitoring/monitoring.yaml
{
    echo "# gpu-migrate without Helm: kubectl apply --server-side -f install.yaml"
    echo "# The chart's defaults, with the scheduler of Kubernetes 1.33; its image should have the version of the cluster."
    for file in base/namespace.yaml crds/gpu*.yaml base/webhook.yaml base/extender.yaml base/operator.yaml base/bridge.yaml base/templates.yaml base/write-restrictions.yaml; do
        echo "---"
        cat "$file"
    done
} >install.yaml
