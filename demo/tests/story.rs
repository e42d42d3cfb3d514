//! The demo from beginning to end, and that its observer would notice.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use gpu_migrate_demo::{self as demo, DemoArgs, Fault, Outcome};

#[tokio::test(flavor = "multi_thread")]
async fn the_story_ends_well() {
    let outcome = demo::run(DemoArgs { fast: true, ..DemoArgs::default() }).await.unwrap();
    assert_eq!(outcome.violations.total(), 0, "{:?}", outcome.violations.told);
    assert_eq!((outcome.cards, outcome.before), (13, 8));
    // vision/detect stays legacy; danlu's six and the six notebooks share.
    assert_eq!((outcome.legacy, outcome.sharing), (2, 12));
    assert!(outcome.freed() >= 2, "{outcome:?}");
    // Eight legacy pods; five converted; train converted, back, and converted; six notebooks.
    assert!(outcome.scheduler.bound >= 22, "{:?}", outcome.scheduler);
}

/// So many cards of two have a share; then a legacy pod comes past the scheduler. Only the node agent stands in its way.
fn past_the_scheduler(shares: usize, ready: usize) -> String {
    format!(
        r#"
nodes: [{{name: node-a, cards: 2, model: Tesla-T4, memoryMiB: 15360}}]
steps:
  - apply: {{apiVersion: v1, kind: Namespace, metadata: {{name: team}}}}
  - apply:
      apiVersion: apps/v1
      kind: Deployment
      metadata: {{name: shared, namespace: team}}
      spec:
        replicas: {shares}
        selector: {{matchLabels: {{app: shared}}}}
        template:
          metadata: {{labels: {{app: shared}}}}
          spec:
            schedulerName: gpu-migrate-scheduler
            containers: [{{name: c, image: i, resources: {{limits: {{tencent.com/vcuda-core: 60, tencent.com/vcuda-memory: 10}}}}}}]
  - ready: {{namespace: team, pods: {shares}}}
  - apply:
      apiVersion: v1
      kind: Pod
      metadata: {{name: legacy, namespace: team}}
      spec:
        nodeName: node-a
        containers: [{{name: c, image: i, resources: {{limits: {{nvidia.com/gpu: 1}}}}}}]
  - ready: {{namespace: team, pods: {ready}}}
"#
    )
}

async fn tell(story: &str, fault: Option<Fault>) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("story.yaml");
    std::fs::write(&script, story).unwrap();
    demo::run(DemoArgs { fast: true, script: Some(script), fault, ..DemoArgs::default() }).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_kinds_on_a_card_are_noticed_and_a_sound_agent_refuses() {
    let broken = tell(&past_the_scheduler(1, 2), Some(Fault::LyingPlugin)).await;
    assert!(broken.violations.exclusive > 0, "{broken:?}");
    let sound = tell(&past_the_scheduler(2, 2), None).await;
    assert_eq!(sound.violations.total(), 0, "{:?}", sound.violations.told);
}
