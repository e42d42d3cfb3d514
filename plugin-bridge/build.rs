//! Compiles gpu-manager's registration protocol in Rust (protox), so that building needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    tonic_prost_build::compile_fds(protox::compile(["vcuda.proto"], ["proto"])?)?;
    Ok(())
}
