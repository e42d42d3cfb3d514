{{- define "gpu-migrate.schedulerConfiguration" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: true
  resourceName: gpu-migrate-scheduler
  resourceNamespace: {{ .Release.Namespace }}
profiles:
  - schedulerName: {{ .Values.extender.scheduler.name }}
extenders:
  - urlPrefix: http://127.0.0.1:3456/scheduler
    filterVerb: filter
    prioritizeVerb: prioritize
    preemptVerb: preempt
    bindVerb: bind
    weight: 10
    # Names only: the extender watches the nodes itself.
    nodeCacheCapable: true
    # Never true: with an ignorable extender a failed bind falls back to the default binder, and the pod is bound
    # without a card.
    ignorable: false
    httpTimeout: 30s
    # Pods that ask for none of these never reach the extender. Not ignoredByScheduler: the scheduler's own count
    # keeps full nodes away from it, and preemption needs it.
    managedResources:
      - {name: tencent.com/vcuda-core, ignoredByScheduler: false}
      - {name: tencent.com/vcuda-memory, ignoredByScheduler: false}
      - {name: nvidia.com/gpu, ignoredByScheduler: false}
{{- end }}
