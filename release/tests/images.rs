//! The images that are written: what is in them, and that the same input gives the same bytes.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    collections::BTreeMap,
    fs,
    io::Read,
    path::Path,
    process::Command,
    time::{Duration, SystemTime},
};

use flate2::read::GzDecoder;
use gpu_migrate_release::{
    bundle,
    debian::PACKAGES,
    images::{COMPONENTS, Source},
    oci::{Entry, Image, Layer, Tree, digest},
};
use jiff::Timestamp;
use serde_json::Value;

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
        revision: "abc".into(),
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
        for (label, value) in [("version", "1.2.3"), ("revision", "abc"), ("licenses", "Apache-2.0")] {
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

/// Krew installs what the manifest names, Helm the chart, and `sha256sum --check` finds nothing to complain about.
#[test]
fn a_bundle_has_what_its_manifests_name() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut source) = source(folder.path(), 1) else { return };
    source.tag = env!("CARGO_PKG_VERSION").into();
    let operator = source.programs.join("gpu-migrate-operator");
    fs::copy(operator, source.programs.join("gpu-migrate")).unwrap();
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let images = BTreeMap::from([("images/one.tar".to_owned(), b"an image".to_vec())]);
    let made = bundle::files(&source, &checkout, &[], &images).unwrap();
    assert_eq!(made, bundle::files(&source, &checkout, &[], &images).unwrap(), "not the same bytes");

    let text = |name: &str| String::from_utf8(made[name].clone()).unwrap();
    let sums = text("SHA256SUMS");
    for (name, content) in made.iter().chain(&images).filter(|(name, _)| *name != "SHA256SUMS") {
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
    let error = bundle::files(&source, &checkout, &[], &images).unwrap_err().to_string();
    assert!(error.contains("Chart.yaml does not say version: 9.9.9"), "{error}");
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
