//! Which pods the API server sends to the webhook, and which the backstop reports: the CEL that is registered, evaluated.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use gpu_migrate_sim::cluster::api::conditions::hold;
use gpu_migrate_webhook::configuration::{Address, WebhookConfiguration};
use serde_json::{Value, json};

fn configuration() -> WebhookConfiguration {
    WebhookConfiguration::new(Address::Url("https://unused".into()), "gpu-migrate-system")
}

fn pod(resource: Option<&str>, metadata: Value) -> Value {
    let resources = resource.map_or_else(|| json!({}), |name| json!({"limits": {name: "1"}}));
    json!({"metadata": metadata, "spec": {"containers": [{"name": "main", "resources": resources}]}})
}

/// In a guarded namespace every pod goes to one of the two webhooks, but for the one that opted out of the first; a converted pod
/// goes to the first again.
#[test]
fn every_pod_of_a_guarded_namespace_is_reviewed() {
    let registered = configuration().mutating(None);
    let created = json!({"operation": "CREATE"});
    let debugged = json!({"operation": "UPDATE", "subResource": "ephemeralcontainers"});
    let opted_out = json!({"labels": {"gpu-migrate.io/opt-out": "true"}});
    let mirror = json!({"annotations": {"kubernetes.io/config.mirror": "x"}});
    let gpu = Some("nvidia.com/gpu");
    for (name, pod, request, expected) in [
        ("whole cards", pod(gpu, json!({})), &created, [true, false]),
        ("shares", pod(Some("tencent.com/vcuda-core"), json!({})), &created, [true, false]),
        ("no card", pod(None, json!({})), &created, [false, true]),
        ("no card, other labels", pod(None, json!({"labels": {"app": "x"}})), &created, [false, true]),
        ("no card, opted out", pod(None, opted_out.clone()), &created, [false, true]),
        // The first webhook's objectSelector keeps it out.
        ("whole cards, opted out", pod(gpu, opted_out), &created, [true, true]),
        (
            "not opted out",
            pod(gpu, json!({"labels": {"gpu-migrate.io/opt-out": "no"}})),
            &created,
            [true, false],
        ),
        ("kubectl debug", pod(gpu, json!({})), &debugged, [true, true]),
        ("a mirror pod", pod(gpu, mirror), &created, [false, false]),
    ] {
        let called = [0, 1].map(|index| hold(&registered["webhooks"][index], &pod, request).unwrap());
        assert_eq!(called, expected, "{name}");
    }
}

/// What the webhook has reviewed and left as it is passes, whatever the reason: an undo, a wave that is not due.
#[test]
fn the_backstop_refuses_only_what_was_not_reviewed() {
    let [policy, _] = configuration().admission_policy(true);
    let reviewed = json!({"annotations": {"gpu-migrate.io/reviewed": "not_in_rollout"}});
    let converted = json!({"annotations": {"gpu-migrate.io/policy": "p@1"}});
    let gpu = Some("nvidia.com/gpu");
    for (name, pod, passes) in [
        ("not reviewed", pod(gpu, json!({})), false),
        ("not reviewed, other annotations", pod(gpu, json!({"annotations": {"a": "b"}})), false),
        ("reviewed", pod(gpu, reviewed), true),
        ("converted to HAMi", pod(gpu, converted), true),
        ("converted", pod(Some("tencent.com/vcuda-core"), json!({})), true),
        ("no card", pod(None, json!({})), true),
    ] {
        let validation = json!({"matchConditions": policy["spec"]["validations"]});
        assert_eq!(hold(&validation, &pod, &json!({})), Ok(passes), "{name}");
        assert_eq!(hold(&policy["spec"], &pod, &json!({})), Ok(true), "{name}");
    }
}
