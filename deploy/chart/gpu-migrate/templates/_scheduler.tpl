{{- define "gpu-migrate.schedulerConfiguration" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: true
  resourceName: gpu-migrate-scheduler
  resourceNamespace: {{ .Release.Namespace }}
clientConnection:
  # The scheduler's own default of 50 requests a second is two a pod: 25 pods a second.
  qps: 500
  burst: 1000
# Of 5,000 nodes the default looks at a tenth, and a pod would wait, or preempt others, though another node has a card.
percentageOfNodesToScore: 100
profiles:
  - schedulerName: {{ .Values.extender.scheduler.name }}
    plugins:
      score:
        # They spread pods over nodes, against the extender's packing. What a pod itself asks for (affinity, taints, its own
        # topology spread constraints) counts.
        disabled:
          - name: NodeResourcesFit
          - name: NodeResourcesBalancedAllocation
          - name: ImageLocality
    pluginConfig:
      - name: PodTopologySpread
        args: {defaultingType: List, defaultConstraints: []}
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
    # Above the extender's --gang-timeout and twice its --api-timeout: 18 s and 5 s.
    httpTimeout: 30s
    # Pods that ask for none of these never reach the extender. Not ignoredByScheduler: the scheduler's own count
    # keeps full nodes away from it, and preemption needs it.
    managedResources:
      - {name: tencent.com/vcuda-core, ignoredByScheduler: false}
      - {name: tencent.com/vcuda-memory, ignoredByScheduler: false}
      - {name: nvidia.com/gpu, ignoredByScheduler: false}
{{- end }}
