//! The CustomResourceDefinitions as files, from the types in `gpu_migrate_model::crd`.

use gpu_migrate_model::crd;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

/// One definition and the file it is kept in.
#[derive(Debug)]
pub struct CrdFile {
    pub name: String,
    pub yaml: String,
}

#[must_use]
pub fn files() -> Vec<CrdFile> {
    crd::definitions().iter().map(file).collect()
}

fn file(crd: &CustomResourceDefinition) -> CrdFile {
    // A definition is made of maps, lists and scalars: there is nothing in it that JSON could not hold.
    let value = serde_json::to_value(crd).unwrap_or_default();
    CrdFile {
        name: format!("{}.yaml", crd.spec.names.plural),
        yaml: format!("# Made by `gpu-migrate crds`; do not edit.\n{}", crate::plan::diff::to_yaml(&value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// `gpu-migrate crds --dir deploy/crds` makes them current.
    #[test]
    fn the_files_in_deploy_are_current() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/crds");
        for file in files() {
            let there = std::fs::read_to_string(folder.join(&file.name)).unwrap_or_default();
            assert!(
                there == file.yaml,
                "deploy/crds/{} is not what the types say: run `cargo run -- crds --dir deploy/crds`",
                file.name
            );
        }
        let count = std::fs::read_dir(&folder)
            .unwrap()
            .filter(|e| e.as_ref().unwrap().path().extension().is_some_and(|x| x == "yaml"))
            .count();
        assert_eq!(
            count,
            files().len() + usize::from(folder.join("kustomization.yaml").exists()),
            "a file in deploy/crds that no type makes"
        );
    }

    #[test]
    fn what_is_written_reads_back_as_the_definition() {
        for (file, crd) in files().iter().zip(crd::definitions()) {
            let back: CustomResourceDefinition = serde_saphyr::from_str(&file.yaml).unwrap();
            assert_eq!(back, crd, "{}", file.name);
        }
    }
}
