//! Compiles the protocols in Rust (protox), so that building needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["deviceplugin.proto", "podresources.proto"], ["proto"])?;
    // Ordered maps: equal answers encode to equal bytes, which the kubelet's checkpoint records.
    tonic_prost_build::configure()
        .btree_map(".")
        .extern_path(".v1beta1.ListAndWatchResponse", "crate::deviceplugin::ListAndWatchResponse")
        .compile_fds(descriptors)?;
    Ok(())
}
