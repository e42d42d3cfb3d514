// Command work is everything that runs in the scenarios' pods, in one static binary without dependencies:
//
//	work pause      the sandbox of a pod: waits to be told to stop
//	work serve      a workload: says on stdout what environment it got and what devices it sees, then waits to be told to stop
//	work linger     the same, but it goes on until it is killed
//	work exit N     a workload that ends at once with status N
//	work without X  a probe: fails where the variable X has a value
//	work --any …    stands in for another program, so that a manifest of it makes a pod: waits to be told to stop
//
// Called as "gpu-migrate-cni" it is a CNI plugin that answers without making any interface; called as "kube-scheduler" it
// stands in for that; called as "nvidia-container-runtime" it is runc with the NVML stand-in in each container that asks for
// cards, as NVIDIA's runtime does with the driver's library.
package main

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	switch name := filepath.Base(os.Args[0]); {
	case name == "gpu-migrate-cni":
		cni()
	case name == "nvidia-container-runtime":
		runc()
	case name == "kube-scheduler" || len(os.Args) > 1 && strings.HasPrefix(os.Args[1], "--"):
		waitForSignal()
	case len(os.Args) == 2 && os.Args[1] == "pause":
		waitForSignal()
	case len(os.Args) == 2 && os.Args[1] == "serve":
		report()
		waitForSignal()
	case len(os.Args) == 2 && os.Args[1] == "linger":
		report()
		signal.Ignore(syscall.SIGTERM)
		for {
			time.Sleep(time.Hour)
		}
	case len(os.Args) == 3 && os.Args[1] == "exit":
		report()
		status, err := strconv.Atoi(os.Args[2])
		if err != nil {
			fail("exit status %q is not a whole number", os.Args[2])
		}
		os.Exit(status)
	case len(os.Args) == 3 && os.Args[1] == "without":
		if value := os.Getenv(os.Args[2]); value != "" {
			fail("%s is %q", os.Args[2], value)
		}
	default:
		fail("usage: work pause | serve | linger | exit N | without NAME | --anything")
	}
}

// waitForSignal also reaps: as process 1 of a sandbox it inherits orphans.
func waitForSignal() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

func report() {
	devices, _ := filepath.Glob("/dev/nvidia*")
	_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"environment": os.Environ(), "devices": devices})
}

// cni answers ADD with an address that is derived from the container's ID: nothing in the scenarios talks over the pod
// network, but the kubelet wants every pod to have an address.
func cni() {
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		fail("%v", err)
	}
	switch os.Getenv("CNI_COMMAND") {
	case "VERSION":
		fmt.Println(`{"cniVersion":"0.4.0","supportedVersions":["0.3.1","0.4.0"]}`)
	case "ADD":
		h := fnv.New32a()
		_, _ = h.Write([]byte(os.Getenv("CNI_CONTAINERID")))
		sum := h.Sum32()
		address := fmt.Sprintf("127.77.%d.%d", sum>>8&0xff, 1+sum&0xff%254)
		fmt.Printf(`{"cniVersion":"0.4.0","interfaces":[{"name":%q,"sandbox":%q}],"ips":[{"version":"4","address":"%s/16","interface":0}]}`+"\n",
			os.Getenv("CNI_IFNAME"), os.Getenv("CNI_NETNS"), address)
	}
}

// runc takes the library's path from NVML_STAND_IN and runc's own from RUNC, which containerd passes on.
func runc() {
	for i, argument := range os.Args {
		if argument == "--bundle" && i+1 < len(os.Args) {
			if err := addLibrary(filepath.Join(os.Args[i+1], "config.json")); err != nil {
				fail("%v", err)
			}
		}
	}
	fail("%v", syscall.Exec(os.Getenv("RUNC"), append([]string{"runc"}, os.Args[1:]...), os.Environ()))
}

func addLibrary(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if !strings.Contains(string(text), `"NVIDIA_VISIBLE_DEVICES=`) {
		return nil
	}
	var config map[string]any
	// Numbers stay as they are written: memory limits do not survive a float.
	decoder := json.NewDecoder(strings.NewReader(string(text)))
	decoder.UseNumber()
	if err := decoder.Decode(&config); err != nil {
		return err
	}
	mounts, _ := config["mounts"].([]any)
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	config["mounts"] = append(mounts, map[string]any{
		"destination": "/usr/lib/" + triplet + "/libnvidia-ml.so.1",
		"type":        "bind",
		"source":      os.Getenv("NVML_STAND_IN"),
		"options":     []string{"bind", "ro", "nosuid", "nodev"},
	})
	text, err = json.Marshal(config)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

func fail(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
	os.Exit(1)
}
