//! What is written: the images and the other files, that the same input gives the same bytes, and that no change of a signed release
//! goes unnoticed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    collections::BTreeMap,
    fs,
    io::Read,
    path::Path,
    process::Command,
    time::{Duration, SystemTime},
};

use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use flate2::read::GzDecoder;
use gpu_migrate_release::{
    bundle,
    debian::PACKAGES,
    images::{Built, COMPONENTS, Source},
    oci::{Entry, Image, Layer, Tree, digest},
    signature::{PrivateKey, PublicKey},
    signed::{self, Files},
};
use jiff::Timestamp;
use serde_json::{Value, json};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const BUILDER: &str = "https://example.com/workflow@v1";

/// A package of a few files under its real name, as `dpkg-deb` builds it.
fn package(folder: &Path, name: &str, time: u64) {
    let tree = folder.join("tree").join(name);
    let files: &[(&str, &str)] = match name {
        "base-files" => &[("etc/debian_version", "12.0\n"), ("bin/sh", "no shell")],
        "ca-certificates" => &[
            ("usr/share/ca-certificates/mozilla/B.crt", "second\n"),
            ("usr/share/ca-certificates/mozilla/A.crt", "first\n"),
        ],
        "libc6" => &[("lib/x86_64-linux-gnu/libc.so.6", "libc"), ("usr/bin/ldd", "a program")],
        _ => &[("lib/x86_64-linux-gnu/libgcc_s.so.1", "libgcc")],
    };
    let control = format!(
        "Package: {name}\nVersion: 1\nArchitecture: amd64\nMaintainer: nobody <nobody@example.com>\nDescription: for a test\n"
    );
    for (path, content) in files.iter().copied().chain([("DEBIAN/control", control.as_str())]) {
        let path = tree.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(time);
        fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    }
    let target = folder.join("packages").join(format!("{name}_1_amd64.deb"));
    fs::create_dir_all(target.parent().unwrap()).unwrap();
    let output =
        Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(tree).arg(target).output();
    assert!(output.unwrap().status.success());
}

/// Everything that images are made of, made at some time; `None` where there is no dpkg.
fn source(folder: &Path, time: u64) -> Option<Source> {
    if Command::new("dpkg-deb").arg("--version").output().is_err() {
        gpu_migrate_tests::skipped("dpkg-deb builds the packages of this test (Debian package dpkg)");
        return None;
    }
    for name in PACKAGES {
        package(folder, name, time);
    }
    let programs = folder.join("programs");
    fs::create_dir_all(&programs).unwrap();
    for component in COMPONENTS {
        let mut elf = b"\x7fELF".to_vec();
        elf.resize(18, 0);
        elf.extend([0x3e, 0]);
        elf.extend(component.program.as_bytes());
        fs::write(programs.join(component.program), elf).unwrap();
    }
    Some(Source {
        programs,
        packages: folder.join("packages"),
        registry: "registry.example/mirror".into(),
        tag: "1.2.3".into(),
        revision: COMMIT.into(),
        notices: "licences".into(),
        created: Timestamp::from_second(1_700_000_000).unwrap(),
    })
}

/// The files of a tar by path.
fn files(tar: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in tar::Archive::new(tar).entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().to_string_lossy().into_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        assert!(found.insert(path, content).is_none(), "twice in one tar");
    }
    found
}

/// Follows a descriptor, and checks its digest and size.
fn blob(layout: &BTreeMap<String, Vec<u8>>, descriptor: &Value) -> Vec<u8> {
    let name = descriptor["digest"].as_str().unwrap();
    let blob = &layout[&format!("blobs/{}", name.replace(':', "/"))];
    assert_eq!(digest(blob), name);
    assert_eq!(descriptor["size"], blob.len());
    blob.clone()
}

fn document(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

#[test]
fn two_builds_have_the_same_digests() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let Some(first) = source(one.path(), 1_000_000_000) else { return };
    let second = source(other.path(), 1_600_000_000).unwrap();
    let digests = |source: &Source| -> Vec<(String, String, String)> {
        let built = source.build().unwrap();
        built.into_iter().map(|b| (b.name, b.layout.digest, digest(&b.layout.tar))).collect()
    };
    assert_eq!(digests(&first), digests(&second));
    // Another program is another image, and no other image.
    fs::write(first.programs.join("gpu-migrate-operator"), b"\x7fELF\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x3e\0!")
        .unwrap();
    let changed = digests(&first).into_iter().zip(digests(&second)).filter(|(a, b)| a != b);
    assert_eq!(
        changed.map(|(a, _)| a.0).collect::<Vec<_>>(),
        ["registry.example/mirror/gpu-migrate-operator:1.2.3"]
    );
}

#[test]
fn an_image_has_its_program_glibc_and_labels() {
    let folder = tempfile::tempdir().unwrap();
    let Some(source) = source(folder.path(), 1) else { return };
    let all = source.build().unwrap();
    assert_eq!(all.len(), COMPONENTS.len());
    for (built, component) in all.iter().zip(COMPONENTS) {
        let layout = files(&built.layout.tar);
        let index = document(&layout["index.json"]);
        assert_eq!(document(&layout["oci-layout"])["imageLayoutVersion"], "1.0.0");
        let entry = &index["manifests"][0];
        assert_eq!(entry["digest"], built.layout.digest.as_str());
        assert_eq!(entry["annotations"]["io.containerd.image.name"], built.name.as_str());
        let manifest = document(&blob(&layout, entry));
        let config = document(&blob(&layout, &manifest["config"]));
        assert_eq!(config["architecture"], "amd64");
        assert_eq!(config["created"], "2023-11-14T22:13:20Z");
        assert_eq!(config["config"]["Entrypoint"][0], format!("/{}", component.program));
        let root = component.program == "gpu-migrate-bridge";
        assert_eq!(config["config"]["User"], if root { "0:0" } else { "65532:65532" });
        for (label, value) in [("version", "1.2.3"), ("revision", COMMIT), ("licenses", "Apache-2.0")] {
            assert_eq!(config["config"]["Labels"][format!("org.opencontainers.image.{label}")], value);
            assert_eq!(manifest["annotations"][format!("org.opencontainers.image.{label}")], value);
        }
        let mut content = BTreeMap::new();
        for (number, layer) in manifest["layers"].as_array().unwrap().iter().enumerate() {
            let mut tar = Vec::new();
            GzDecoder::new(blob(&layout, layer).as_slice()).read_to_end(&mut tar).unwrap();
            assert_eq!(config["rootfs"]["diff_ids"][number], digest(&tar));
            content.extend(files(&tar));
        }
        assert_eq!(content["etc/ssl/certs/ca-certificates.crt"], b"first\nsecond\n");
        assert_eq!(content["lib/x86_64-linux-gnu/libc.so.6"], b"libc");
        assert_eq!(content["etc/debian_version"], b"12.0\n");
        assert!(String::from_utf8_lossy(&content["var/lib/dpkg/status.d/libc6"]).contains("Version: 1"));
        assert_eq!(content["usr/share/doc/gpu-migrate/THIRD-PARTY"], b"licences");
        assert!(content.contains_key(component.program) && content.contains_key("tmp/"));
        assert!(!content.contains_key("bin/sh") && !content.contains_key("usr/bin/ldd"), "{content:?}");
    }
}

/// The files of a release, and of what; `None` where there is no dpkg. Each image is as good as the other, so there is one.
fn release(folder: &Path) -> Option<(Source, Files)> {
    let mut source = source(folder, 1)?;
    source.tag = env!("CARGO_PKG_VERSION").into();
    let made = bundled(&source).unwrap();
    Some((source, made))
}

fn bundled(source: &Source) -> anyhow::Result<Files> {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let images = source.build()?.into_iter().filter(|image| image.name.contains("-webhook"));
    bundle::files(source, &checkout, &[], images.collect::<Vec<Built>>(), BUILDER)
}

/// Krew installs what the manifest names, Helm the chart, and `sha256sum --check` finds nothing to complain about.
#[test]
fn a_bundle_has_what_its_manifests_name() {
    let folder = tempfile::tempdir().unwrap();
    let Some((mut source, made)) = release(folder.path()) else { return };
    assert_eq!(made, bundled(&source).unwrap(), "not the same bytes");

    let text = |name: &str| String::from_utf8(made[name].clone()).unwrap();
    let sums = text("SHA256SUMS");
    for (name, content) in made.iter().filter(|(name, _)| *name != "SHA256SUMS") {
        let line = format!("{}  {name}\n", digest(content).trim_start_matches("sha256:"));
        assert!(sums.contains(&line), "{name}: {sums}");
    }
    assert!(text(&format!("gpu-migrate-{}.cdx.json", source.tag)).contains("pkg:deb/debian/libc6@1"));
    let archive = format!("gpu-migrate-{}-linux-amd64.tar.gz", source.tag);
    let krew = text("gpu-migrate-krew.yaml");
    assert!(krew.contains(digest(&made[&archive]).trim_start_matches("sha256:")), "{krew}");
    assert!(krew.contains(&format!("/v{0}/{archive}", source.tag)), "{krew}");
    let unpacked = |name: &str| {
        let mut tar = Vec::new();
        GzDecoder::new(made[name].as_slice()).read_to_end(&mut tar).unwrap();
        files(&tar)
    };
    let archive = unpacked(&archive);
    assert_eq!(archive.keys().collect::<Vec<_>>(), ["LICENSE", "THIRD-PARTY", "gpu-migrate"]);
    let chart = unpacked(&format!("gpu-migrate-{}.tgz", source.tag));
    for name in
        ["Chart.yaml", "values.yaml", "values.schema.json", "templates/webhook.yaml", "files/alerts.yaml"]
    {
        assert!(chart.contains_key(&format!("gpu-migrate/{name}")), "{name}");
    }
    assert!(text("RELEASE_NOTES.md").starts_with("The first version."), "{}", text("RELEASE_NOTES.md"));

    source.tag = "9.9.9".into();
    let error = bundled(&source).unwrap_err().to_string();
    assert!(error.contains("Chart.yaml does not say version: 9.9.9"), "{error}");
}

/// in-toto Statement v1 with SLSA provenance v1.
#[test]
fn the_provenance_names_all_files_images_and_what_they_were_made_of() {
    let folder = tempfile::tempdir().unwrap();
    let Some((source, made)) = release(folder.path()) else { return };
    let statement = document(&made["provenance.json"]);
    assert_eq!(statement["_type"], "https://in-toto.io/Statement/v1");
    assert_eq!(statement["predicateType"], "https://slsa.dev/provenance/v1");

    let mut subjects: BTreeMap<&str, &Value> = BTreeMap::new();
    for subject in statement["subject"].as_array().unwrap() {
        subjects.insert(subject["name"].as_str().unwrap(), &subject["digest"]);
    }
    let sha256 = |content: &[u8]| json!({"sha256": digest(content).trim_start_matches("sha256:")});
    for (name, content) in
        made.iter().filter(|(name, _)| !["SHA256SUMS", "provenance.json"].contains(&name.as_str()))
    {
        assert_eq!(subjects.remove(name.as_str()), Some(&sha256(content)), "{name}");
    }
    // What remains is the image, by the digest that a registry knows it by.
    let tar = files(&made[&format!("gpu-migrate-webhook-{}-amd64.tar", source.tag)]);
    let manifest = blob(&tar, &document(&tar["index.json"])["manifests"][0]);
    let name = format!("registry.example/mirror/gpu-migrate-webhook:{}", source.tag);
    assert_eq!(subjects, BTreeMap::from([(name.as_str(), &sha256(&manifest))]));

    let build = &statement["predicate"]["buildDefinition"];
    assert!(build["buildType"].as_str().unwrap().contains(&format!("/v{}/", source.tag)), "{build}");
    let parameters =
        json!({"tag": source.tag, "registry": source.registry, "created": "2023-11-14T22:13:20Z"});
    assert_eq!(build["externalParameters"], parameters);
    let inputs = build["resolvedDependencies"].as_array().unwrap();
    assert_eq!(
        inputs[0],
        json!({"uri": "git+https://github.com/gpu-migrate/gpu-migrate", "digest": {"gitCommit": COMMIT}})
    );
    let digest_of = |path: &Path| sha256(&fs::read(path).unwrap());
    let libc = digest_of(&source.packages.join("libc6_1_amd64.deb"));
    assert!(inputs.contains(&json!({"uri": "pkg:deb/debian/libc6@1", "digest": libc})), "{inputs:?}");
    let agent = digest_of(&source.programs.join("gpu-migrate-bridge"));
    assert!(inputs.contains(&json!({"name": "gpu-migrate-bridge", "digest": agent})), "{inputs:?}");
    assert_eq!(inputs.len(), 1 + COMPONENTS.len() + PACKAGES.len());
    assert_eq!(statement["predicate"]["runDetails"]["builder"]["id"], BUILDER);
}

fn key() -> PrivateKey {
    let key = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).unwrap().to_pkcs8v1().unwrap();
    PrivateKey::from_pem(pem::encode(&pem::Pem::new("PRIVATE KEY", key.as_ref())).as_bytes()).unwrap()
}

fn change(files: &mut Files, name: &str, from: &str, to: &str) {
    let content = String::from_utf8(files[name].clone()).unwrap();
    assert!(content.contains(from), "{name}: {content}");
    files.insert(name.into(), content.replace(from, to).into_bytes());
}

/// What is changed in a release, how, and what is said of it.
type Change<'a> = (&'a str, &'a dyn Fn(&mut Files), &'a str);

#[test]
fn a_signed_release_is_verified_and_every_change_of_it_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let Some((source, made)) = release(folder.path()) else { return };
    let key = key();
    let sign = |files: &Files, key: &PrivateKey| {
        let mut files = files.clone();
        files.extend(signed::sign(&files, key).unwrap());
        files
    };
    let release = sign(&made, &key);
    let public = key.public().unwrap();
    let statement = signed::verify(&release, &public).unwrap();
    assert_eq!((statement.commit().unwrap(), statement.builder()), (COMMIT, BUILDER));
    assert!(statement.images().next().unwrap().contains("/gpu-migrate-webhook:"));
    // Signing again replaces the signatures.
    signed::verify(&sign(&release, &key), &public).unwrap();

    let mut next = source;
    next.revision = COMMIT.replace("01", "10");
    let next = sign(&bundled(&next).unwrap(), &key);
    let other = sign(&made, &self::key());
    let install = digest(&made["install.yaml"]).trim_start_matches("sha256:").to_owned();
    let changes: [Change<'_>; 11] = [
        (
            "a file",
            &|files| change(files, "install.yaml", "kind: Namespace", "kind: Secret"),
            "install.yaml was changed: SHA256SUMS says sha256:",
        ),
        ("a checksum", &|files| change(files, "SHA256SUMS", &install, COMMIT), "has not signed SHA256SUMS"),
        ("a file is missing", &|files| drop(files.remove("install.yaml")), "the release has no install.yaml"),
        (
            "a file more",
            &|files| drop(files.insert("extra.yaml".into(), b"kind: Pod".to_vec())),
            "extra.yaml is not in SHA256SUMS, so nobody has signed it",
        ),
        (
            "no signature",
            &|files| drop(files.remove("SHA256SUMS.sig")),
            "no SHA256SUMS.sig: it was not signed",
        ),
        (
            "no signed provenance",
            &|files| drop(files.remove("provenance.intoto.jsonl")),
            "no provenance.intoto.jsonl: it was not signed",
        ),
        (
            "the provenance",
            &|files| change(files, "provenance.json", BUILDER, "https://example.com/another"),
            "provenance.json was changed",
        ),
        (
            "the signed provenance",
            &|files| {
                let payload = BASE64.encode(&next["provenance.json"]);
                change(files, "provenance.intoto.jsonl", &BASE64.encode(&made["provenance.json"]), &payload);
            },
            "provenance.intoto.jsonl: this key has not signed its payload",
        ),
        (
            "the type of the signed provenance",
            &|files| change(files, "provenance.intoto.jsonl", "vnd.in-toto+json", "json"),
            "its payload is of the type application/json",
        ),
        (
            "another key's provenance",
            &|files| {
                drop(
                    files.insert("provenance.intoto.jsonl".into(), other["provenance.intoto.jsonl"].clone()),
                );
            },
            "provenance.intoto.jsonl: this key has not signed its payload",
        ),
        (
            "another release's provenance",
            &|files| {
                drop(files.insert("provenance.intoto.jsonl".into(), next["provenance.intoto.jsonl"].clone()));
            },
            "provenance.intoto.jsonl contains another statement than provenance.json",
        ),
    ];
    for (what, apply, expected) in changes {
        let mut changed = release.clone();
        apply(&mut changed);
        let error = format!("{:#}", signed::verify(&changed, &public).expect_err(what));
        assert!(error.contains(expected), "{what}: {error}");
    }
    let error = format!("{:#}", signed::verify(&other, &public).unwrap_err());
    assert!(error.contains("SHA256SUMS.sig: this key has not signed SHA256SUMS"), "{error}");
}

#[test]
fn only_a_whole_release_of_a_commit_is_signed() {
    let folder = tempfile::tempdir().unwrap();
    let Some((mut source, made)) = release(folder.path()) else { return };
    let refused = |files: &Files| format!("{:#}", signed::sign(files, &key()).unwrap_err());

    let mut changed = made.clone();
    change(&mut changed, "install.yaml", "kind: Namespace", "kind: Secret");
    assert!(refused(&changed).contains("install.yaml was changed"), "{}", refused(&changed));

    // A provenance about other files than the checksums are of.
    for (from, to, expected) in [
        (r#""name": "install.yaml""#, r#""name": "other.yaml""#, "provenance.json says None of install.yaml"),
        (
            "slsa.dev/provenance/v1",
            "slsa.dev/provenance/v2",
            "predicateType is https://slsa.dev/provenance/v2",
        ),
    ] {
        let mut changed = made.clone();
        change(&mut changed, "provenance.json", from, to);
        let [before, after] = [&made, &changed].map(|files| digest(&files["provenance.json"]).split_off(7));
        change(&mut changed, "SHA256SUMS", &before, &after);
        assert!(refused(&changed).contains(expected), "{}", refused(&changed));
    }

    source.revision = format!("{COMMIT}-dirty");
    let error = refused(&bundled(&source).unwrap());
    assert!(
        error.contains("-dirty\", which is no commit; make the release in a checkout without changes"),
        "{error}"
    );
}

/// What cosign does with a key is what OpenSSL does.
#[test]
fn openssl_verifies_both_signatures() {
    let folder = tempfile::tempdir().unwrap();
    let Some((_, mut made)) = release(folder.path()) else { return };
    let path = |name: &str| folder.path().join(name);
    let openssl = |arguments: &[&str]| {
        Command::new("openssl")
            .args(arguments)
            .current_dir(folder.path())
            .output()
            .map(|output| output.status.success())
    };
    let make = ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", "key.pem"];
    if openssl(&make).is_err() {
        return gpu_migrate_tests::skipped("openssl is not there (Debian package openssl)");
    }
    assert!(openssl(&["pkey", "-in", "key.pem", "-pubout", "-out", "key.pub"]).unwrap());
    let key = PrivateKey::from_pem(&fs::read(path("key.pem")).unwrap()).unwrap();
    made.extend(signed::sign(&made, &key).unwrap());
    signed::verify(&made, &PublicKey::from_pem(&fs::read(path("key.pub")).unwrap()).unwrap()).unwrap();

    let envelope = document(&made["provenance.intoto.jsonl"]);
    let statement = &made["provenance.json"];
    let mut encoded = format!("DSSEv1 28 application/vnd.in-toto+json {} ", statement.len()).into_bytes();
    encoded.extend(statement);
    let sig = BASE64.decode(envelope["signatures"][0]["sig"].as_str().unwrap()).unwrap();
    for (message, signature) in [(&made["SHA256SUMS"], &made["SHA256SUMS.sig"]), (&encoded, &sig)] {
        fs::write(path("signature"), signature).unwrap();
        for (message, valid) in [(message.clone(), true), ([message.as_slice(), b"x"].concat(), false)] {
            fs::write(path("message"), message).unwrap();
            let arguments = ["dgst", "-sha256", "-verify", "key.pub", "-signature", "signature", "message"];
            assert_eq!(openssl(&arguments).unwrap(), valid);
        }
    }
    for (key, conversion) in [("key.pub", "openssl pkcs8"), ("key.pem", "openssl pkey -in KEY -pubout")] {
        let text = fs::read(path(key)).unwrap();
        let refused = [PrivateKey::from_pem(&text).err(), PublicKey::from_pem(&text).err()];
        let error = format!("{:#}", refused.into_iter().flatten().next().unwrap());
        assert!(error.contains(conversion), "{key}: {error}");
    }
    let make = ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384", "-out", "other.pem"];
    assert!(openssl(&make).unwrap());
    let error = PrivateKey::from_pem(&fs::read(path("other.pem")).unwrap()).unwrap_err().to_string();
    assert!(error.contains("no private key for ECDSA on P-256"), "{error}");
}

/// What the documents and the workflow have it called with is what it has.
#[test]
fn the_documented_commands_are_ones() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let program = env!("CARGO_BIN_EXE_gpu-migrate-release");
    for (file, expected) in [("deploy/README.md", 6), (".github/workflows/release.yml", 3)] {
        let text = fs::read_to_string(root.join(file)).unwrap();
        let calls = text.split("gpu-migrate-release -- ").skip(1).collect::<Vec<_>>();
        assert_eq!(calls.len(), expected, "{file}");
        for call in calls {
            let mut words = call.split(['\n', '`']).next().unwrap().split_whitespace();
            let help = Command::new(program).args([words.next().unwrap(), "--help"]).output().unwrap();
            assert!(help.status.success(), "{file}: {call}");
            let help = String::from_utf8(help.stdout).unwrap();
            for flag in words.filter(|word| word.starts_with("--")) {
                assert!(
                    help.contains(&format!("{flag} ")) || help.contains(&format!("{flag}\n")),
                    "{file}: {flag}"
                );
            }
        }
    }
}

#[test]
fn errors_name_the_file_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let Some(source) = source(folder.path(), 1) else { return };
    let error = || format!("{:#}", source.build().unwrap_err());
    let operator = source.programs.join("gpu-migrate-operator");
    fs::write(&operator, b"\x7fELF\0\0\0\0\0\0\0\0\0\0\0\0\0\0\xb7\0").unwrap();
    assert!(error().contains("programs of different architectures"), "{}", error());
    fs::write(&operator, "#!/bin/sh").unwrap();
    assert!(error().contains("cannot use gpu-migrate-operator: it is no ELF program"), "{}", error());
    fs::remove_file(&operator).unwrap();
    assert!(error().contains("cargo build --profile dist"), "{}", error());
    let folder = tempfile::tempdir().unwrap();
    let source = self::source(folder.path(), 1).unwrap();
    fs::copy(source.packages.join("libc6_1_amd64.deb"), source.packages.join("libc6_2_amd64.deb")).unwrap();
    let error = format!("{:#}", source.build().unwrap_err());
    assert!(error.contains("several versions of libc6"), "{error}");
}

#[test]
fn a_layer_names_its_folders_and_an_image_its_tag() {
    let tree = Tree::from([
        ("a/b/file".into(), Entry::File { mode: 0o600, content: b"x".to_vec() }),
        ("a/link".into(), Entry::Link("b/file".into())),
    ]);
    let layer = Layer::new(&tree, Timestamp::UNIX_EPOCH).unwrap();
    let image = |name| {
        let image = Image {
            name,
            architecture: "amd64",
            created: Timestamp::UNIX_EPOCH,
            layers: vec![&layer],
            entrypoint: vec!["/a/link"],
            arguments: vec![],
            environment: vec![],
            user: "",
            labels: BTreeMap::new(),
        };
        image.layout()
    };
    assert!(image("localhost:5000/name").is_err());
    let layout = files(&image("localhost:5000/name:1").unwrap().tar);
    let manifest = document(&blob(&layout, &document(&layout["index.json"])["manifests"][0]));
    let mut tar = Vec::new();
    GzDecoder::new(blob(&layout, &manifest["layers"][0]).as_slice()).read_to_end(&mut tar).unwrap();
    assert_eq!(files(&tar).into_keys().collect::<Vec<_>>(), ["a/", "a/b/", "a/b/file", "a/link"]);
}
