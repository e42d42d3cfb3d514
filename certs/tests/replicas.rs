//! Several replicas, one CA: through a Secret and a Lease; and the caBundle that follows it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use base64::Engine;
use common::FakeApi;
use gpu_migrate_certs::inject::{Injector, Kind};
use gpu_migrate_certs::{CertRotator, Certs, Clock, Lifetimes, Options, SecretPlace, Source};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const SECRET: &str = "/api/v1/namespaces/gpu/secrets/ca";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/gpu/leases/ca";
const CONFIGURATION: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/gpu-migrate";
const LIVES: Lifetimes = Lifetimes { ca: Duration::from_secs(30_000), leaf: Duration::from_secs(3000) };

struct Time(Arc<AtomicI64>);

impl Time {
    fn new() -> Self {
        Self(Arc::new(AtomicI64::new(1_800_000_000)))
    }

    /// The clock of a replica that is `skew` seconds ahead.
    fn clock(&self, skew: i64) -> Clock {
        let time = Arc::clone(&self.0);
        Arc::new(move || Timestamp::from_second(time.load(Ordering::SeqCst) + skew).unwrap())
    }

    fn forward(&self, seconds: i64) {
        self.0.fetch_add(seconds, Ordering::SeqCst);
    }
}

async fn replica(api: &FakeApi, identity: &str, clock: Clock) -> (Certs, CertRotator) {
    let place = SecretPlace {
        client: api.client(),
        namespace: "gpu".into(),
        name: "ca".into(),
        identity: identity.into(),
    };
    let options = Options { owner: "test".into(), names: vec!["w.gpu.svc".into()], lifetimes: LIVES };
    Certs::start(Source::Secret(place), options, clock).await.unwrap()
}

fn bundle(certs: &Certs) -> String {
    certs.bundle().borrow().clone().unwrap().0
}

#[tokio::test]
async fn the_first_replica_creates_the_ca_and_all_use_it() {
    let (api, time) = (FakeApi::default(), Time::new());
    let start = |name| replica(&api, name, time.clock(0));
    let ((a, _), (b, _), (c, _)) = tokio::join!(start("a"), start("b"), start("c"));
    assert_eq!(
        api.writes().iter().filter(|write| write.contains("secrets")).count(),
        1,
        "{:?}",
        api.writes()
    );
    assert!(bundle(&a) == bundle(&b) && bundle(&b) == bundle(&c));
    let secret = api.get(SECRET).unwrap();
    assert_eq!(secret["metadata"]["labels"]["app.kubernetes.io/managed-by"], "gpu-migrate");
    assert!(secret["data"]["signing.key"].is_string());
}

#[tokio::test]
async fn replicas_with_clocks_apart_rotate_together() {
    let (api, time) = (FakeApi::default(), Time::new());
    // A minute apart; leafs are back-dated by five.
    let mut replicas = [
        replica(&api, "a", time.clock(0)).await,
        replica(&api, "b", time.clock(60)).await,
        replica(&api, "c", time.clock(-60)).await,
    ];
    let mut cas = std::collections::HashSet::new();
    for _ in 0..400 {
        time.forward(300);
        let ticks = replicas.iter_mut().map(|(_, rotator)| rotator.tick());
        for result in futures::future::join_all(ticks).await {
            result.unwrap();
        }
        // A replica that ticked before the last write reads it at the next tick: after one more all agree.
        for (_, rotator) in &mut replicas {
            rotator.tick().await.unwrap();
        }
        let bundles: Vec<String> = replicas.iter().map(|(certs, _)| bundle(certs)).collect();
        assert!(bundles.windows(2).all(|pair| pair[0] == pair[1]), "all know the same CAs");
        cas.extend(
            replicas[0].0.bundle().borrow().as_ref().unwrap().certificates().iter().map(|ca| ca.to_vec()),
        );
    }
    // 120 000 s at two thirds of 30 000 s each.
    assert!((5..=8).contains(&cas.len()), "{} CAs", cas.len());
    assert_eq!(api.get(LEASE).unwrap()["spec"]["holderIdentity"], "", "held only while rotating");
}

/// What a clock that is years ahead would do: announce, promote and forget CAs in one go, with certificates that no client accepts.
#[tokio::test]
async fn a_replica_whose_clock_is_off_makes_nothing() {
    let (api, time) = (FakeApi::default(), Time::new());
    api.set_date("Fri, 15 Jan 2027 08:00:00 GMT");
    let (right, _) = replica(&api, "a", time.clock(0)).await;
    right.check().unwrap();
    let before = (bundle(&right), api.writes());
    for skew in [2 * 365 * 86_400, -365 * 86_400, 301] {
        let (wrong, mut rotator) = replica(&api, "b", time.clock(skew)).await;
        assert!(wrong.check().unwrap_err().contains("no certificate yet"));
        let error = rotator.tick().await.unwrap_err().to_string();
        assert!(error.contains("and the API server's 2027-01-15T08:00:00Z"), "{error}");
    }
    assert_eq!((bundle(&right), api.writes()), before);
    let (near, _) = replica(&api, "c", time.clock(299)).await;
    near.check().unwrap();
    let empty = FakeApi::default();
    empty.set_date("Fri, 15 Jan 2027 08:00:00 GMT");
    replica(&empty, "d", time.clock(-3600)).await;
    assert!(empty.writes().is_empty(), "nor a first CA");
}

#[tokio::test(start_paused = true)]
async fn only_the_holder_of_the_lease_rotates() {
    let (api, time) = (FakeApi::default(), Time::new());
    let (certs, mut rotator) = replica(&api, "a", time.clock(0)).await;
    let before = bundle(&certs);
    time.forward(21_000);
    // Renewed years ago by its holder's clock: clocks need not agree.
    api.put(
        LEASE,
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "ca"},
        "spec": {"holderIdentity": "b", "leaseDurationSeconds": 60, "renewTime": "2020-01-01T00:00:00.000000Z"}}),
    );
    for _ in 0..2 {
        rotator.tick().await.unwrap();
        assert_eq!(bundle(&certs), before, "another replica rotates");
        tokio::time::advance(Duration::from_secs(30)).await;
    }
    tokio::time::advance(Duration::from_secs(1)).await;
    rotator.tick().await.unwrap();
    assert_ne!(bundle(&certs), before, "it has not renewed the Lease for its duration");
    assert_eq!(api.get(LEASE).unwrap()["spec"]["holderIdentity"], "", "released for the next rotation");
}

#[tokio::test]
async fn a_damaged_secret_changes_nothing() {
    let (api, time) = (FakeApi::default(), Time::new());
    let (certs, mut rotator) = replica(&api, "a", time.clock(0)).await;
    let before = bundle(&certs);
    let mut damaged = api.get(SECRET).unwrap();
    damaged["data"]["signing.crt"] = json!("bm90aGluZw==");
    api.put(SECRET, damaged);
    let error = rotator.tick().await.unwrap_err().to_string();
    assert!(error.contains("Secret gpu/ca: signing.crt"), "{error}");
    assert!(certs.check().is_ok() && bundle(&certs) == before);
}

#[tokio::test]
async fn a_deleted_secret_is_created_again_and_keeps_the_cas_in_use() {
    let (api, time) = (FakeApi::default(), Time::new());
    let (certs, mut rotator) = replica(&api, "a", time.clock(0)).await;
    let before = bundle(&certs);
    api.remove(SECRET);
    rotator.tick().await.unwrap();
    let after = bundle(&certs);
    assert!(after != before && after.ends_with(&before), "the next CA signs, the old one is still trusted");
}

fn configuration(bundle: &str) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "gpu-migrate"},
        "webhooks": [
            {"name": "pods.gpu-migrate.io", "clientConfig": {"caBundle": bundle}},
            {"name": "other.example.com", "clientConfig": {"caBundle": "b3RoZXI="}},
        ],
    })
}

async fn eventually(what: &str, check: impl Fn() -> bool) {
    for _ in 0..500 {
        if check() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} did not happen");
}

#[tokio::test]
async fn the_ca_bundle_is_injected_through_conflicts_and_follows_the_ca() {
    let (api, time) = (FakeApi::default(), Time::new());
    let (certs, rotator) = replica(&api, "a", time.clock(0)).await;
    api.put(CONFIGURATION, configuration(""));
    api.refuse_writes(2);
    let injector = Injector::new(api.client(), Kind::Mutating, "gpu-migrate", certs.clone());
    let registered = injector.registered();
    assert!(!*registered.borrow());
    let stop = CancellationToken::new();
    let tasks = [tokio::spawn(rotator.run(stop.clone())), tokio::spawn(injector.run(stop.clone()))];
    let injected = || {
        let found = api.get(CONFIGURATION).unwrap();
        let ours = found["webhooks"][0]["clientConfig"]["caBundle"].as_str().unwrap().to_owned();
        assert_eq!(found["webhooks"][1]["clientConfig"]["caBundle"], "b3RoZXI=", "not ours");
        ours == base64::engine::general_purpose::STANDARD.encode(bundle(&certs))
    };
    eventually("injection", || injected() && *registered.borrow()).await;
    // A new CA is announced: the next to ask reads it, and it is injected without a restart.
    let before = bundle(&certs);
    time.forward(21_000);
    certs.refresh().await;
    assert_ne!(bundle(&certs), before);
    eventually("injection of the next CA", injected).await;
    stop.cancel();
    for task in tasks {
        task.await.unwrap();
    }
}
