//! `gpu-migrate verify --install`: whether what was installed works. [`findings`] is pure.

use super::preflight::{self, Finding, Level, Report};
use super::{Answer, Snapshot};
use crate::args::VerifyArgs;
use crate::errors::{is_absent, of_server};
use crate::style::counted;
use gpu_migrate_model::names::{Dialect, GROUP, VERSION};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Label of all objects of chart and base.
const OURS: &str = "app.kubernetes.io/name=gpu-migrate";
const COMPONENT: &str = "app.kubernetes.io/component";
const RELEASE: &str = "app.kubernetes.io/version";
/// The schedulers beside the extenders elect a leader by it.
const SCHEDULER_LEASE: &str = "gpu-migrate-scheduler";
/// kube-scheduler renews its Lease every two seconds.
const STALE: SignedDuration = SignedDuration::from_secs(60);
/// Which review an answer belongs to.
const REVIEW: &str = "gpu-migrate-verify";

/// What is installed, as the API server has it.
#[derive(Debug, Clone)]
pub struct Installation {
    pub namespace: String,
    pub definitions: Vec<CustomResourceDefinition>,
    pub deployments: Vec<Deployment>,
    /// Names of our ValidatingAdmissionPolicies.
    pub restrictions: BTreeSet<String>,
    /// Of the schedulers beside the extenders.
    pub lease: Option<Lease>,
    /// The webhook's answer to a pod, or why there is none.
    pub review: Result<Value, String>,
    /// Nodes, GPUShadows and webhook configurations.
    pub snapshot: Snapshot,
}

pub(crate) async fn read(args: &VerifyArgs) -> anyhow::Result<Installation> {
    let client = args.look.cluster.reach.client().await?;
    let namespace = args.namespace.clone();
    let ours = ListParams::default().labels(OURS);
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let mut found = Vec::new();
    for name in definition_names() {
        found.extend(definitions.get_opt(&name).await?);
    }
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(client.clone());
    let restrictions = match policies.list_metadata(&ours).await {
        Ok(list) => list.items.iter().map(kube::ResourceExt::name_any).collect(),
        Err(error) if is_absent(&error) => BTreeSet::new(),
        Err(error) => return Err(error.into()),
    };
    Ok(Installation {
        definitions: found,
        deployments: Api::namespaced(client.clone(), &namespace).list(&ours).await?.items,
        restrictions,
        lease: Api::namespaced(client.clone(), &namespace).get_opt(SCHEDULER_LEASE).await?,
        review: review(&client, &namespace).await,
        snapshot: Snapshot::of_installation(&client).await?,
        namespace,
    })
}

fn definition_names() -> [String; 3] {
    ["gpuconfigs", "gpumigrations", "gpushadows"].map(|plural| format!("{plural}.{GROUP}"))
}

/// Has the API server call the webhook through its Service, with a pod that exists nowhere.
async fn review(client: &Client, namespace: &str) -> Result<Value, String> {
    let pods = json!({"group": "", "version": "v1", "resource": "pods"});
    let limits = json!({Dialect::default().legacy: "1"});
    let body = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": REVIEW, "kind": {"group": "", "version": "v1", "kind": "Pod"}, "resource": pods, "operation": "CREATE",
        "namespace": "default", "userInfo": {"username": REVIEW}, "dryRun": true,
        "object": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": REVIEW, "namespace": "default"},
            "spec": {"containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}]}},
    }});
    let path =
        format!("/api/v1/namespaces/{namespace}/services/https:gpu-migrate-webhook:https/proxy/mutate");
    let request = http::Request::post(path).header("content-type", "application/json");
    let request = request.body(body.to_string().into_bytes()).map_err(|error| error.to_string())?;
    client.request(request).await.map_err(|error| of_server(&error, None))
}

/// What works and what does not; nothing of it is about a project.
#[must_use]
pub fn findings(installation: &Installation, now: Timestamp) -> Vec<Finding> {
    type Check = fn(&Installation, Timestamp, &mut Report);
    let checks: [(&'static str, Check); 8] = [
        ("definitions", definitions),
        ("Deployments", deployments),
        ("versions", versions),
        ("webhook", |installation, _, report| preflight::webhook(&installation.snapshot, report)),
        ("webhook's answer", answer),
        ("scheduler", scheduler),
        ("node agents", |installation, _, report| preflight::node_agents(&installation.snapshot, report)),
        ("write restrictions", restrictions),
    ];
    let mut all = Vec::new();
    for (check, run) in checks {
        let mut report = Report { check, findings: Vec::new() };
        run(installation, now, &mut report);
        all.extend(report.findings);
    }
    all
}

fn definitions(installation: &Installation, _: Timestamp, report: &mut Report) {
    for name in definition_names() {
        let found = installation.definitions.iter().find(|definition| definition.name_any() == name);
        let serves = |definition: &CustomResourceDefinition| {
            let conditions = definition.status.iter().flat_map(|status| status.conditions.iter().flatten());
            let mut conditions = conditions.filter(|condition| condition.type_ == "Established");
            conditions.any(|condition| condition.status == "True")
                && definition.spec.versions.iter().any(|version| version.name == VERSION && version.served)
        };
        if !found.is_some_and(serves) {
            let problem =
                if found.is_some() { "does not serve" } else { "does not exist, which should serve" };
            let found = format!("CustomResourceDefinition {name} {problem} {VERSION}");
            report.add(Level::NoGo, found, "gpu-migrate crds | kubectl apply --server-side -f -");
        }
    }
    report.good(format!("{} serve {VERSION}", definition_names().join(", ")));
}

fn component(deployment: &Deployment) -> &str {
    deployment.labels().get(COMPONENT).map_or("", String::as_str)
}

fn deployments(installation: &Installation, _: Timestamp, report: &mut Report) {
    let namespace = &installation.namespace;
    for name in ["webhook", "extender", "operator"] {
        let Some(deployment) = installation.deployments.iter().find(|found| component(found) == name) else {
            let (level, remedy) = match name {
                "extender" => {
                    (Level::Warn, "Then the cluster's own scheduler must call an extender: deploy/scheduler")
                }
                _ => (Level::NoGo, "Install it (deploy/README.md), or name the namespace with -n"),
            };
            report.add(level, format!("there is no Deployment of the {name} in {namespace}"), remedy);
            continue;
        };
        let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
        let status = deployment.status.as_ref();
        let available = status.and_then(|status| status.available_replicas).unwrap_or(0);
        if available < wanted || wanted == 0 {
            let level = if available == 0 { Level::NoGo } else { Level::Warn };
            let found = format!(
                "Deployment {namespace}/{}: {available} of {wanted} pods are available",
                deployment.name_any()
            );
            report.add(
                level,
                found,
                "kubectl describe its pods, and read their logs; at least one must be available",
            );
        }
    }
    report.good("all pods are available".into());
}

fn versions(installation: &Installation, _: Timestamp, report: &mut Report) {
    let own = env!("CARGO_PKG_VERSION");
    let found: BTreeSet<&str> = installation
        .deployments
        .iter()
        .filter_map(|found| Some(found.labels().get(RELEASE)?.as_str()))
        .collect();
    let list = found.iter().copied().collect::<Vec<_>>().join(", ");
    if found.iter().any(|version| *version != own) {
        let found = format!("installed {list}, this program is {own}");
        report.add(Level::Warn, found, "Finish the upgrade, or use the program of the installed version");
    }
    report.good(list);
}

fn answer(installation: &Installation, _: Timestamp, report: &mut Report) {
    let problem = match &installation.review {
        Err(why) => format!("the API server gets no answer from it: {why}"),
        Ok(review) if review["response"]["uid"] != REVIEW || review["response"]["allowed"] != true => {
            format!("it answers a pod with {}", review["response"])
        }
        Ok(_) => return report.good("a pod was reviewed, by way of the API server and the Service".into()),
    };
    report.add(
        Level::NoGo,
        problem,
        "Let the API server reach port 9443 of the pods (firewall, NetworkPolicy, overlay network: webhook.hostNetwork); where the webhook demands a client certificate, this check cannot succeed",
    );
}

fn scheduler(installation: &Installation, now: Timestamp, report: &mut Report) {
    if !installation.deployments.iter().any(|deployment| component(deployment) == "extender") {
        return report.good("no second scheduler is installed".into());
    }
    let spec = installation.lease.as_ref().and_then(|lease| lease.spec.as_ref());
    let leader = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
    let renewed = spec.and_then(|spec| spec.renew_time.as_ref()).map(|time| time.0);
    if leader.is_empty() || renewed.is_none_or(|time| now.duration_since(time) > STALE) {
        let found = match renewed {
            Some(time) if !leader.is_empty() => {
                format!("{leader} leads, and has not renewed its Lease since {time}")
            }
            _ => "none leads, so nothing is scheduled".to_owned(),
        };
        report.add(
            Level::NoGo,
            found,
            "Read the logs of the container scheduler of Deployment gpu-migrate-extender",
        );
    }
    report.good(format!("{leader} leads"));
}

fn restrictions(installation: &Installation, _: Timestamp, report: &mut Report) {
    let count = installation.restrictions.iter().filter(|name| name.starts_with("gpu-migrate-")).count();
    if count == 0 {
        report.add(
            Level::Warn,
            "no ValidatingAdmissionPolicy restricts what our accounts write".into(),
            "Install them (writeRestrictions.enabled): without them the token of one node's agent can change pods of every node",
        );
    }
    report.good(counted(count, "policy"));
}

pub(crate) fn verify(installation: &Installation, now: Timestamp) -> Answer {
    preflight::answer(&findings(installation, now))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Timestamp {
        "2026-11-22T12:00:00Z".parse().unwrap()
    }

    fn of<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    /// As it is right after `helm install`.
    fn installed() -> Installation {
        let definition = |name: String| {
            let names = json!({"kind": "K", "plural": "p"});
            of(
                json!({"metadata": {"name": name}, "spec": {"group": GROUP, "names": names, "scope": "Cluster",
                "versions": [{"name": VERSION, "served": true, "storage": true}]},
                "status": {"conditions": [{"type": "Established", "status": "True"}]}}),
            )
        };
        let deployment = |component: &str| {
            let labels = json!({COMPONENT: component, RELEASE: env!("CARGO_PKG_VERSION")});
            of(json!({"metadata": {"name": format!("gpu-migrate-{component}"), "labels": labels},
                "spec": {"replicas": 2, "selector": {}, "template": {}}, "status": {"availableReplicas": 2}}))
        };
        let hook = json!({"metadata": {"name": "gpu-migrate"}, "webhooks": [{"name": "w", "sideEffects": "None",
            "admissionReviewVersions": ["v1"], "failurePolicy": "Ignore", "clientConfig": {"caBundle": "Y2E="},
            "namespaceSelector": {"matchLabels": {"gpu-migrate.io/opt-in": "true"}}}]});
        Installation {
            namespace: "gpu-migrate-system".into(),
            definitions: definition_names().map(definition).into(),
            deployments: ["webhook", "extender", "operator"].map(deployment).into(),
            restrictions: ["gpu-migrate-bridge-pods".to_owned()].into(),
            lease: Some(of(
                json!({"spec": {"holderIdentity": "a", "renewTime": "2026-11-22T11:59:58.000000Z"}}),
            )),
            review: Ok(json!({"response": {"uid": REVIEW, "allowed": true}})),
            snapshot: Snapshot { mutating: vec![of(hook)], ..Snapshot::default() },
        }
    }

    /// What is a no-go, by its check.
    fn wrong(installation: &Installation) -> Vec<String> {
        let all = findings(installation, now());
        all.iter().filter(|f| f.level == Level::NoGo).map(|f| format!("{}: {}", f.check, f.found)).collect()
    }

    #[test]
    fn a_new_installation_works() {
        assert_eq!(wrong(&installed()), Vec::<String>::new());
        let warned = findings(&installed(), now()).into_iter().filter(|f| f.level == Level::Warn);
        assert_eq!(warned.map(|f| f.check).collect::<Vec<_>>(), ["node agents"], "no node is bridged yet");
    }

    #[test]
    fn each_part_that_fails_is_named() {
        type Break = fn(&mut Installation);
        let cases: [(&str, Break); 9] = [
            ("definitions: CustomResourceDefinition gpushadows", |i| drop(i.definitions.pop())),
            ("definitions: CustomResourceDefinition gpuconfigs", |i| {
                i.definitions[0].spec.versions[0].served = false;
            }),
            ("Deployments: Deployment gpu-migrate-system/gpu-migrate-webhook: 0 of 2", |i| {
                i.deployments[0].status = None;
            }),
            ("Deployments: there is no Deployment of the operator", |i| drop(i.deployments.pop())),
            ("webhook: MutatingWebhookConfiguration gpu-migrate does not exist", |i| {
                i.snapshot.mutating.clear();
            }),
            ("webhook's answer: the API server gets no answer from it: refused", |i| {
                i.review = Err("refused".into());
            }),
            ("webhook's answer: it answers a pod with", |i| {
                i.review = Ok(json!({"response": {"uid": REVIEW, "allowed": false}}));
            }),
            ("scheduler: none leads", |i| {
                i.lease = None;
            }),
            ("scheduler: a leads, and has not renewed its Lease since 2026-11-22T11:00:00Z", |i| {
                let spec = i.lease.as_mut().and_then(|lease| lease.spec.as_mut()).unwrap();
                spec.renew_time = Some(of(json!("2026-11-22T11:00:00.000000Z")));
            }),
        ];
        for (expected, change) in cases {
            let mut installation = installed();
            change(&mut installation);
            let found = wrong(&installation);
            assert!(matches!(found.as_slice(), [one] if one.starts_with(expected)), "{expected}: {found:?}");
        }
    }

    #[test]
    fn what_can_be_left_out_is_a_warning() {
        let mut installation = installed();
        installation.deployments.remove(1);
        installation.lease = None;
        installation.restrictions.clear();
        assert_eq!(wrong(&installation), Vec::<String>::new());
        let warned = findings(&installation, now()).into_iter().filter(|f| f.level == Level::Warn);
        let checks = warned.map(|f| f.check).collect::<Vec<_>>();
        assert_eq!(checks, ["Deployments", "node agents", "write restrictions"]);
    }
}
