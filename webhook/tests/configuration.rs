//! The webhook configuration and the backstop, as the API server gets them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use gpu_migrate_certs::Bundle;
use gpu_migrate_webhook::configuration::{Address, WebhookConfiguration};
use serde_json::{Value, json};

fn configured() -> WebhookConfiguration {
    let address = Address::Service { namespace: "gpu".into(), name: "webhook".into(), port: 443 };
    WebhookConfiguration::new(address, "gpu")
}

#[test]
fn the_webhook_keeps_out_of_everything_that_did_not_ask_for_it() {
    let configuration = configured().mutating(None);
    let [pods, guard] = configuration["webhooks"].as_array().unwrap().as_slice() else {
        panic!("two webhooks")
    };
    for webhook in [pods, guard] {
        assert_eq!(webhook["failurePolicy"], "Ignore");
        assert_eq!(webhook["sideEffects"], "None");
        assert_eq!(webhook["reinvocationPolicy"], "IfNeeded");
        assert_eq!(webhook["matchPolicy"], "Equivalent");
        assert_eq!(webhook["timeoutSeconds"], 5);
        assert_eq!(webhook["rules"][0]["operations"], json!(["CREATE"]));
        assert_eq!(webhook["rules"][0]["resources"], json!(["pods"]));
        let selector = &webhook["namespaceSelector"];
        assert_eq!(selector["matchLabels"]["gpu-migrate.io/opt-in"], "true");
        let never = json!({"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["gpu", "kube-node-lease", "kube-system"]});
        assert_eq!(selector["matchExpressions"], json!([never]));
        assert!(webhook["clientConfig"].get("caBundle").is_none(), "left to what injects it");
    }
    let opt_out = json!({"key": "gpu-migrate.io/opt-out", "operator": "NotIn", "values": ["true"]});
    assert_eq!(pods["objectSelector"]["matchExpressions"], json!([opt_out]));
    assert_eq!(guard["objectSelector"], json!({}), "no pod is left out of the guard");
    assert_eq!(pods["rules"].as_array().unwrap().len(), 1);
    let ephemeral = &guard["rules"][1];
    assert_eq!(
        (&ephemeral["resources"], &ephemeral["operations"]),
        (&json!(["pods/ephemeralcontainers"]), &json!(["UPDATE"]))
    );
    assert!(pods["namespaceSelector"]["matchLabels"].get("gpu-migrate.io/void-guard").is_none());
    assert_eq!(guard["namespaceSelector"]["matchLabels"]["gpu-migrate.io/void-guard"], "true");
}

#[test]
fn the_conditions_have_the_form_that_was_tried_on_a_real_api_server() {
    let form = |names: &[&str]| {
        let asks = |list: &str| {
            let each: Vec<_> = names.iter().map(|name| format!("'{name}' in c.resources.{list}")).collect();
            format!("(has(c.resources.{list}) && ({}))", each.join(" || "))
        };
        format!(
            "(object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : [])).exists(c, has(c.resources) && ({} || {}))",
            asks("limits"),
            asks("requests"),
        )
    };
    let expression = |configuration: &Value, index: usize| {
        configuration["webhooks"][index]["matchConditions"][0]["expression"].as_str().unwrap().to_owned()
    };
    let plain = configured().mutating(None);
    let asks = form(&["nvidia.com/gpu", "tencent.com/vcuda-core", "tencent.com/vcuda-memory"]);
    assert_eq!(expression(&plain, 0), asks, "a converted pod comes again");
    let others = expression(&plain, 1);
    assert!(others.contains(&format!("!{asks} || (has(object.metadata.labels) && ")), "{others}");
    let [backstop, _] = configured().admission_policy(false);
    let whole = backstop["spec"]["validations"][0]["expression"].as_str().unwrap();
    assert!(whole.starts_with(&format!("!{} || ", form(&["nvidia.com/gpu"]))), "{whole}");
    let mapped = WebhookConfiguration { mapped: ["nvidia.com/mig-1g.5gb".to_owned()].into(), ..configured() };
    let expected =
        "('nvidia.com/gpu' in c.resources.limits || 'nvidia.com/mig-1g.5gb' in c.resources.limits || ";
    assert!(expression(&mapped.mutating(None), 0).contains(expected));
}

#[test]
fn the_address_and_the_bundle() {
    let bundle = Bundle("pem".into());
    let client = |configuration: WebhookConfiguration| {
        configuration.mutating(Some(&bundle))["webhooks"][1]["clientConfig"].clone()
    };
    let service = json!({"namespace": "gpu", "name": "webhook", "port": 443, "path": "/mutate"});
    assert_eq!(client(configured()), json!({"service": service, "caBundle": "cGVt"}));
    let url = WebhookConfiguration::new(Address::Url("https://127.0.0.1:9443/".into()), "gpu");
    assert_eq!(client(url), json!({"url": "https://127.0.0.1:9443/mutate", "caBundle": "cGVt"}));
}

#[test]
fn the_backstop_reports_or_refuses() {
    let [policy, binding] = configured().admission_policy(false);
    assert_eq!(binding["spec"]["validationActions"], json!(["Warn", "Audit"]));
    assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"]);
    assert_eq!(
        policy["spec"]["matchConstraints"]["namespaceSelector"]["matchLabels"]["gpu-migrate.io/opt-in"],
        "true"
    );
    assert!(
        policy["spec"]["validations"][0]["expression"]
            .as_str()
            .unwrap()
            .starts_with("!(object.spec.containers")
    );
    let [_, binding] = configured().admission_policy(true);
    assert_eq!(binding["spec"]["validationActions"], json!(["Deny"]));
}
