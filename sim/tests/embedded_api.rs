//! The embedded API server through real clients: kube-rs, and kubectl where there is one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::process::Command;

use futures::{StreamExt, TryStreamExt};
use gpu_migrate_model::crd::{GPUShadow, GPUShadowSpec};
use gpu_migrate_sim::cluster::api::{ApiServer, Running};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Client, CustomResourceExt, Resource, ResourceExt};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

async fn start() -> (Running, Client) {
    started(ApiServer::default()).await
}

async fn started(server: ApiServer) -> (Running, Client) {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let running = server.serve(0, CancellationToken::new()).await.unwrap();
    let client = running.client().unwrap();
    (running, client)
}

fn pod(name: &str) -> Pod {
    serde_json::from_value(
        json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}}),
    )
    .unwrap()
}

fn map(name: &str, value: &str) -> ConfigMap {
    ConfigMap {
        metadata: kube::api::ObjectMeta { name: Some(name.into()), ..Default::default() },
        data: Some(BTreeMap::from([("key".into(), value.into())])),
        ..Default::default()
    }
}

fn code<T: std::fmt::Debug>(result: kube::Result<T>) -> u16 {
    match result {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("expected a Status, got {other:?}"),
    }
}

#[tokio::test]
async fn objects_come_change_and_go() {
    let (_running, client) = start().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let created = maps.create(&PostParams::default(), &map("a", "1")).await.unwrap();
    assert!(created.uid().is_some() && created.creation_timestamp().is_some());
    assert_eq!(code(maps.create(&PostParams::default(), &map("a", "1")).await), 409);

    let mut changed = created.clone();
    changed.data = map("a", "2").data;
    let changed = maps.replace("a", &PostParams::default(), &changed).await.unwrap();
    assert_ne!(changed.resource_version(), created.resource_version());
    assert_eq!(
        code(maps.replace("a", &PostParams::default(), &created).await),
        409,
        "written from an old version"
    );

    let dry = PostParams { dry_run: true, ..PostParams::default() };
    maps.create(&dry, &map("dry", "1")).await.unwrap();
    assert_eq!(code(maps.get("dry").await), 404);

    let elsewhere: Api<ConfigMap> = Api::namespaced(client.clone(), "nowhere");
    assert_eq!(code(elsewhere.create(&PostParams::default(), &map("a", "1")).await), 404);
    maps.delete("a", &DeleteParams::default()).await.unwrap();
    assert_eq!(code(maps.get("a").await), 404);
}

#[tokio::test]
async fn the_four_forms_of_patch() {
    let (_running, client) = start().await;
    let pods: Api<Pod> = Api::default_namespaced(client);
    pods.create(&PostParams::default(), &pod("p")).await.unwrap();
    let parameters = PatchParams::default();

    let merge = json!({"metadata": {"labels": {"a": "1", "b": "1"}}});
    assert_eq!(pods.patch("p", &parameters, &Patch::Merge(&merge)).await.unwrap().labels().len(), 2);

    let operations = json!([{"op": "remove", "path": "/metadata/labels/b"}]);
    let operations: json_patch::Patch = serde_json::from_value(operations).unwrap();
    let patched = pods.patch("p", &parameters, &Patch::Json::<()>(operations.clone())).await.unwrap();
    assert_eq!(patched.labels().len(), 1);
    assert_eq!(code(pods.patch("p", &parameters, &Patch::Json::<()>(operations)).await), 422);

    let strategic = json!({"spec": {"containers": [{"name": "c", "image": "new"}]}});
    let patched = pods.patch("p", &parameters, &Patch::Strategic(&strategic)).await.unwrap();
    let containers = patched.spec.unwrap().containers;
    assert_eq!((containers.len(), containers[0].image.as_deref()), (1, Some("new")));

    let mine = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": {"a": "mine"}}});
    let refused = pods.patch("p", &PatchParams::apply("me"), &Patch::Apply(&mine)).await;
    assert_eq!(code(refused), 409, "somebody else set the label");
    let patched = pods.patch("p", &PatchParams::apply("me").force(), &Patch::Apply(&mine)).await.unwrap();
    assert_eq!(patched.labels()["a"], "mine");
}

#[tokio::test]
async fn watches_tell_all_and_only_what_is_selected() {
    let (_running, client) = start().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    maps.create(&PostParams::default(), &map("before", "1")).await.unwrap();
    let version = maps.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let selected = WatchParams::default().labels("in=view").timeout(5);
    let mut events = maps.watch(&selected, &version).await.unwrap().boxed();

    let label = |value: Value| Patch::Merge(json!({"metadata": {"labels": {"in": value}}}));
    let parameters = PatchParams::default();
    maps.patch("before", &parameters, &label(json!("view"))).await.unwrap();
    maps.create(&PostParams::default(), &map("other", "1")).await.unwrap();
    maps.patch("before", &parameters, &Patch::Merge(json!({"data": {"key": "2"}}))).await.unwrap();
    maps.patch("before", &parameters, &label(Value::Null)).await.unwrap();

    let mut seen = Vec::new();
    while seen.len() < 3 {
        match events.try_next().await.unwrap().expect("the watch goes on") {
            WatchEvent::Added(object) => seen.push(format!("added {}", object.name_any())),
            WatchEvent::Modified(object) => seen.push(format!("modified {}", object.name_any())),
            WatchEvent::Deleted(object) => seen.push(format!("deleted {}", object.name_any())),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(seen, ["added before", "modified before", "deleted before"]);
}

#[tokio::test]
async fn a_watch_from_long_ago_is_told_so_and_a_quiet_one_gets_a_bookmark() {
    let (_running, client) = started(ApiServer::remembering(8)).await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let first = maps.create(&PostParams::default(), &map("m", "0")).await.unwrap();
    for value in 1..=8 {
        let change = Patch::Merge(json!({"data": {"key": value.to_string()}}));
        maps.patch("m", &PatchParams::default(), &change).await.unwrap();
    }
    let old = (first.resource_version().unwrap().parse::<u64>().unwrap() - 1).to_string();
    let mut events = maps.watch(&WatchParams::default(), &old).await.unwrap().boxed();
    match events.next().await.unwrap() {
        Ok(WatchEvent::Error(status)) => assert_eq!((status.code, status.reason.as_str()), (410, "Expired")),
        Err(kube::Error::Api(status)) => assert_eq!(status.code, 410),
        other => panic!("{other:?}"),
    }
    let now = maps.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut events = maps.watch(&WatchParams::default().timeout(1), &now).await.unwrap().boxed();
    match events.next().await.unwrap().unwrap() {
        WatchEvent::Bookmark(bookmark) => assert_eq!(bookmark.metadata.resource_version, now),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_watcher_of_kube_runtime_follows_in_both_of_its_ways() {
    use kube::runtime::{WatchStreamExt, watcher};
    let (_running, client) = start().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    maps.create(&PostParams::default(), &map("a", "1")).await.unwrap();
    for config in [watcher::Config::default(), watcher::Config::default().streaming_lists()] {
        let mut objects = watcher(maps.clone(), config).applied_objects().boxed();
        assert_eq!(objects.try_next().await.unwrap().unwrap().name_any(), "a");
        maps.create(&PostParams::default(), &map("b", "1")).await.unwrap();
        assert_eq!(objects.try_next().await.unwrap().unwrap().name_any(), "b");
        maps.delete("b", &DeleteParams::default()).await.unwrap();
    }
    let partial: Api<kube::core::PartialObjectMeta<ConfigMap>> = Api::default_namespaced(client.clone());
    let mut metadata = watcher(partial, watcher::Config::default()).applied_objects().boxed();
    assert_eq!(metadata.try_next().await.unwrap().unwrap().name_any(), "a");
}

#[tokio::test]
async fn a_binding_carries_its_annotations_and_comes_once() {
    let (running, client) = start().await;
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let created = pods.create(&PostParams::default(), &pod("p")).await.unwrap();
    let bind = |uid: String| {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "target": {"kind": "Node", "name": "n1"},
            "metadata": {"name": "p", "uid": uid, "annotations": {"card": "3"}, "labels": {"not": "merged"}},
        });
        let uri = format!("{}/api/v1/namespaces/default/pods/p/binding", running.url());
        let request = http::Request::post(uri).header("content-type", "application/json");
        client.request::<Value>(request.body(binding.to_string().into_bytes()).unwrap())
    };
    assert_eq!(code(bind("another".into()).await), 409);
    bind(created.uid().unwrap()).await.unwrap();
    let bound = pods.get("p").await.unwrap();
    assert_eq!(bound.spec.as_ref().unwrap().node_name.as_deref(), Some("n1"));
    assert_eq!(bound.annotations()["card"], "3");
    assert!(bound.labels().is_empty());
    assert_eq!(code(bind(String::new()).await), 409, "a second time");

    // Bound pods go when their kubelet says so.
    let going = pods.delete("p", &DeleteParams::default()).await.unwrap();
    assert!(going.left().unwrap().metadata.deletion_timestamp.is_some());
    pods.delete("p", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert_eq!(code(pods.get("p").await), 404);
}

#[tokio::test]
async fn status_has_a_door_of_its_own() {
    let (_running, client) = start().await;
    let nodes: Api<Node> = Api::all(client);
    let node = serde_json::from_value(json!({"metadata": {"name": "n"}, "status": {"capacity": {"x": "1"}}}))
        .unwrap();
    let created = nodes.create(&PostParams::default(), &node).await.unwrap();
    assert!(created.status.is_none_or(|status| status.capacity.is_none()));
    let both = json!({"metadata": {"labels": {"a": "1"}}, "status": {"capacity": {"cpu": "4"}}});
    let patched = nodes.patch_status("n", &PatchParams::default(), &Patch::Merge(&both)).await.unwrap();
    assert!(patched.labels().is_empty());
    assert_eq!(patched.status.unwrap().capacity.unwrap()["cpu"].0, "4");
    let patched = nodes.patch("n", &PatchParams::default(), &Patch::Merge(&both)).await.unwrap();
    assert_eq!(patched.labels().len(), 1);
}

async fn define_shadows(client: &Client) -> Api<GPUShadow> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let definition = GPUShadow::crd();
    let name = definition.name_any();
    definitions.patch(&name, &PatchParams::apply("test"), &Patch::Apply(&definition)).await.unwrap();
    let established = kube::runtime::conditions::is_crd_established();
    kube::runtime::wait::await_condition(definitions, &name, established).await.unwrap();
    Api::all(client.clone())
}

#[tokio::test]
async fn custom_resources_are_served_once_they_are_defined() {
    let (_running, client) = start().await;
    let shadows: Api<GPUShadow> = Api::all(client.clone());
    assert_eq!(code(shadows.list(&ListParams::default()).await), 404);
    let shadows = define_shadows(&client).await;
    let shadow = GPUShadow::new("n1", GPUShadowSpec::default());
    shadows.create(&PostParams::default(), &shadow).await.unwrap();
    let status =
        json!({"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUShadow", "status": {"free": "0,1"}});
    shadows.patch_status("n1", &PatchParams::apply("bridge"), &Patch::Apply(&status)).await.unwrap();
    let raw = client
        .request::<Value>(
            http::Request::get("/apis/gpu-migrate.io/v1alpha1/gpushadows")
                .header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json")
                .body(Vec::new())
                .unwrap(),
        )
        .await
        .unwrap();
    assert_eq!(raw["kind"], "Table");
    let column =
        raw["columnDefinitions"].as_array().unwrap().iter().position(|c| c["name"] == "Free").unwrap();
    assert_eq!(raw["rows"][0]["cells"][column], "0,1", "{raw}");
    let strategic = Patch::Strategic(json!({"metadata": {"labels": {"a": "1"}}}));
    assert_eq!(code(shadows.patch("n1", &PatchParams::default(), &strategic).await), 415);
}

#[tokio::test]
async fn what_is_not_served_is_refused_by_name() {
    let (_running, client) = start().await;
    let asked = |path: &str| client.request::<Value>(http::Request::get(path).body(Vec::new()).unwrap());
    for (path, expected, says) in [
        ("/apis/rbac.authorization.k8s.io/v1/clusterroles", 501, "clusterroles"),
        ("/api/v1/namespaces/default/pods/p/exec", 501, "exec"),
        ("/openapi/v2", 501, "schemas"),
        ("/apis/unknown.io/v1/things", 404, "could not find"),
    ] {
        match asked(path).await {
            Err(kube::Error::Api(status)) => {
                assert_eq!(status.code, expected, "{path}");
                assert!(status.message.contains(says), "{path}: {}", status.message);
            }
            other => panic!("{path}: {other:?}"),
        }
    }
    let hooks = json!({"webhooks": [{"name": "a.b.c", "clientConfig": {"service": {"name": "x", "namespace": "y"}}}]});
    let mut hooks = hooks;
    hooks["metadata"] = json!({"name": "h"});
    let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
    let request = http::Request::post(path).body(hooks.to_string().into_bytes()).unwrap();
    assert_eq!(code(client.request::<Value>(request).await), 501);
}

#[tokio::test]
async fn a_namespace_takes_what_is_in_it_along() {
    let (_running, client) = start().await;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let namespace = serde_json::from_value(json!({"metadata": {"name": "team"}})).unwrap();
    let created = namespaces.create(&PostParams::default(), &namespace).await.unwrap();
    assert_eq!(created.labels()["kubernetes.io/metadata.name"], "team");
    let maps: Api<ConfigMap> = Api::namespaced(client, "team");
    maps.create(&PostParams::default(), &map("a", "1")).await.unwrap();
    namespaces.delete("team", &DeleteParams::default()).await.unwrap();
    assert_eq!(code(maps.get("a").await), 404);
}

/// Runs kubectl against the server; `None`, said aloud, where there is none.
async fn kubectl(running: &Running, arguments: &[&str], stdin: &str) -> Option<(bool, String)> {
    use tokio::io::AsyncWriteExt;
    if Command::new("kubectl").args(["version", "--client"]).output().is_err() {
        gpu_migrate_tests::skipped("there is no kubectl on the PATH");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("kubeconfig");
    std::fs::write(&config, running.kubeconfig()).unwrap();
    let mut child = tokio::process::Command::new("kubectl")
        .args(["--cache-dir", folder.path().join("cache").to_str().unwrap()])
        .args(arguments)
        .env("KUBECONFIG", &config)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    Some((output.status.success(), text))
}

#[tokio::test]
async fn kubectl_works() {
    let (running, client) = start().await;
    let shadows = define_shadows(&client).await;
    shadows
        .create(&PostParams::default(), &GPUShadow::new("node-a", GPUShadowSpec::default()))
        .await
        .unwrap();
    let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec:\n  replicas: 2\n  \
        selector: {matchLabels: {app: web}}\n  template:\n    metadata: {labels: {app: web}}\n    \
        spec: {containers: [{name: c, image: i, env: [{name: A, value: '1'}]}]}\n";
    Api::<Pod>::default_namespaced(client).create(&PostParams::default(), &pod("solo")).await.unwrap();
    let steps: &[(&[&str], &str, &str)] = &[
        (&["get", "pods,gpushadows"], "", "gpushadow.gpu-migrate.io/node-a"),
        (&["get", "pods", "-o", "wide"], "", "solo   0/1     Pending   0"),
        (&["get", "pod", "solo", "-o", "jsonpath={.spec.containers[0].name}"], "", "c"),
        (&["apply", "-f", "-"], deployment, "deployment.apps/web created"),
        (&["apply", "-f", "-"], deployment, "deployment.apps/web unchanged"),
        (
            &["apply", "--server-side", "--force-conflicts", "-f", "-"],
            deployment,
            "deployment.apps/web serverside-applied",
        ),
        (&["get", "deploy"], "", "web    0/2"),
        (&["scale", "deploy", "web", "--replicas=3"], "", "deployment.apps/web scaled"),
        (&["get", "deploy"], "", "web    0/3"),
        (&["scale", "deploy/web", "--current-replicas=3", "--replicas=1"], "", "deployment.apps/web scaled"),
        (
            &["get", "deploy/web", "--subresource=scale", "-o", "jsonpath={.kind} {.spec}"],
            "",
            "Scale {\"replicas\":1}",
        ),
        (&["label", "pod", "solo", "a=b"], "", "pod/solo labeled"),
        (&["get", "pods", "-l", "a=b", "--no-headers"], "", "solo"),
        (
            &["patch", "pod", "solo", "-p", "{\"spec\":{\"containers\":[{\"name\":\"c\",\"image\":\"j\"}]}}"],
            "",
            "pod/solo patched",
        ),
        (&["describe", "pod", "solo"], "", "Image:      "),
        (&["api-resources", "--api-group=gpu-migrate.io"], "", "gpushadows"),
        (
            &["create", "-f", "-"],
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: team}\n",
            "namespace/team created",
        ),
        (&["create", "namespace", "ops"], "", "namespace/ops created"),
        (&["get", "namespace", "ops"], "", "Active"),
        (&["describe", "namespace", "ops"], "", "No resource quota."),
        (&["delete", "pod", "solo"], "", "pod \"solo\" deleted"),
        (&["delete", "deploy", "web"], "", "deployment.apps \"web\" deleted"),
    ];
    for (arguments, stdin, expected) in steps {
        let Some((success, text)) = kubectl(&running, arguments, stdin).await else { return };
        assert!(success && text.contains(expected), "kubectl {arguments:?}: {text}");
    }
}

/// What kubectl has and this server has not is refused in one sentence, which names it.
#[tokio::test]
async fn kubectl_is_told_what_is_not_there() {
    let (running, client) = start().await;
    Api::<Pod>::default_namespaced(client).create(&PostParams::default(), &pod("solo")).await.unwrap();
    let steps: &[(&[&str], &str)] = &[
        (&["exec", "solo", "--", "true"], "does not serve the subresource exec of pods"),
        (&["logs", "solo"], "does not serve logs: simulated containers print nothing"),
        (&["create", "deployment", "web", "--image=i"], "does not read the kind Deployment in protobuf"),
        (&["create", "quota", "q", "--hard=pods=1"], "does not serve resourcequotas"),
        (&["auth", "can-i", "get", "pods"], "does not read the kind SelfSubjectAccessReview in protobuf"),
        (&["create", "clusterrole", "r", "--verb=get", "--resource=pods"], "does not serve clusterroles"),
    ];
    for (arguments, expected) in steps {
        let Some((success, text)) = kubectl(&running, arguments, "").await else { return };
        assert!(!success && text.contains(expected), "kubectl {arguments:?}: {text}");
        assert_eq!(text.trim().lines().count(), 1, "kubectl {arguments:?}: {text}");
    }
}

#[tokio::test]
async fn events_of_both_groups_are_the_same_ones() {
    let (running, client) = start().await;
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let solo = pods.create(&PostParams::default(), &pod("solo")).await.unwrap();
    // As our components write them.
    let recorder = kube::runtime::events::Recorder::new(client.clone(), "extender".to_owned().into());
    let event = kube::runtime::events::Event {
        type_: kube::runtime::events::EventType::Normal,
        reason: "Placed".into(),
        note: Some("on card 3".into()),
        action: "Binding".into(),
        secondary: None,
    };
    recorder.publish(&event, &solo.object_ref(&())).await.unwrap();
    let core = Api::<k8s_openapi::api::core::v1::Event>::default_namespaced(client.clone());
    let of_solo = ListParams::default().fields("involvedObject.name=solo,involvedObject.kind=Pod");
    let found = core.list(&of_solo).await.unwrap().items;
    assert_eq!((found.len(), found[0].message.as_deref()), (1, Some("on card 3")));
    let new = Api::<k8s_openapi::api::events::v1::Event>::default_namespaced(client);
    let regarding = ListParams::default().fields("regarding.name=solo");
    let found = new.list(&regarding).await.unwrap().items;
    assert_eq!((found.len(), found[0].note.as_deref()), (1, Some("on card 3")));
    assert_eq!(found[0].reporting_controller.as_deref(), Some("extender"));
    // The same one again makes a series of it.
    recorder.publish(&event, &solo.object_ref(&())).await.unwrap();
    let again = core.list(&of_solo).await.unwrap().items;
    assert_eq!((again.len(), again[0].series.as_ref().and_then(|series| series.count)), (1, Some(2)));

    let by_hand = "apiVersion: v1\nkind: Event\nmetadata: {name: mine}\ninvolvedObject: {kind: Node, name: n1}\n\
        message: looked at\nreason: Checked\ntype: Normal\nlastTimestamp: 2026-01-01T00:00:00Z\n";
    let steps: &[(&[&str], &str, &str)] = &[
        (&["describe", "pod", "solo"], "", "extender  on card 3"),
        (&["events", "--for", "pod/solo"], "", "on card 3"),
        (&["apply", "-f", "-"], by_hand, "event/mine created"),
        (&["get", "events"], "", "Checked   node/n1"),
        (&["get", "events.v1.events.k8s.io"], "", "Placed    pod/solo"),
        (&["events"], "", "looked at"),
    ];
    for (arguments, stdin, expected) in steps {
        let Some((success, text)) = kubectl(&running, arguments, stdin).await else { return };
        assert!(success && text.contains(expected), "kubectl {arguments:?}: {text}");
    }
}

async fn define_ours(client: &Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in gpu_migrate_model::crd::definitions() {
        definitions.create(&PostParams::default(), &definition).await.unwrap();
    }
}

/// A policy of these lines below `spec`.
fn policy(spec: &str) -> String {
    format!(
        "apiVersion: gpu-migrate.io/v1alpha1\nkind: GPUMigration\nmetadata: {{name: team}}\nspec: {spec}\n"
    )
}

#[tokio::test]
async fn custom_resources_are_validated_by_their_definitions() {
    let (running, client) = start().await;
    define_ours(&client).await;
    let bad_gate = "{project: team, mode: true, rollout: {waves: [{percent: 1, workloads: [a]}]}}";
    // Arguments, policy, exit by success, what is said.
    let steps: &[(&[&str], &str, bool, &str)] = &[
        (
            &["apply", "-f", "-"],
            "{project: team, projekt: x}",
            false,
            "GPUMigration in version \"v1alpha1\" cannot be handled as a GPUMigration: strict decoding error: unknown field \"spec.projekt\"",
        ),
        (
            &["apply", "-f", "-"],
            "{mode: Audit}",
            false,
            "The GPUMigration \"team\" is invalid: spec.project: Required value",
        ),
        (&["apply", "-f", "-"], bad_gate, false, "spec.mode: Invalid value: \"boolean\""),
        (
            &["create", "-f", "-"],
            "{project: team, convert: {coresPerCard: 200}}",
            false,
            "spec.convert: Invalid value: \"object\": coresPerCard must be from 1 to 100: 100 is a whole card",
        ),
        (
            &["apply", "--validate=warn", "-f", "-"],
            "{project: team, projekt: x}",
            true,
            "Warning: unknown field \"spec.projekt\"",
        ),
        (
            &["get", "gpum", "team", "-o", "jsonpath={.spec.projekt}{.spec.rollout.unit}"],
            "",
            true,
            "Workload",
        ),
        (
            &["apply", "-f", "-"],
            "{project: team, mode: Audit}",
            true,
            "gpumigration.gpu-migrate.io/team configured",
        ),
        (
            &["apply", "-f", "-"],
            "{project: team, mode: Audit}",
            true,
            "gpumigration.gpu-migrate.io/team unchanged",
        ),
        (
            &["apply", "-f", "-"],
            "{project: team, mode: Sometimes}",
            false,
            "spec.mode: Unsupported value: \"Sometimes\"",
        ),
        (
            &["apply", "-f", "-"],
            "{project: team, wave: 1}",
            false,
            "strict decoding error: unknown field \"spec.wave\"",
        ),
        (
            &["apply", "--server-side", "--force-conflicts", "-f", "-"],
            "{project: team, wave: 1}",
            false,
            ".spec.wave: field not declared in schema",
        ),
        (
            &["patch", "gpum", "team", "--type=merge", "-p", "{\"spec\":{\"project\":7}}"],
            "",
            false,
            "must be of type string",
        ),
    ];
    for (arguments, spec, good, expected) in steps {
        let stdin = if spec.is_empty() { String::new() } else { policy(spec) };
        let Some((success, text)) = kubectl(&running, arguments, &stdin).await else { return };
        assert!(success == *good && text.contains(expected), "kubectl {arguments:?} with {spec}: {text}");
    }
}
