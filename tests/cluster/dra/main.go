// Command dra stands in for NVIDIA's DRA driver (dra-driver-nvidia-gpu) on machines without a card: it publishes the cards of the NVML
// stand-in under that driver's names, and the containers of a claim get the claimed cards' device nodes by CDI. The kubelet's side is
// Kubernetes' own helper.
//
//	dra --kubeconfig FILE --node NAME --cards N --cdi FOLDER
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

const (
	driverName = "gpu.nvidia.com"
	cdiKind    = "k8s.gpu.nvidia.com/device"
	dataFolder = "/var/lib/kubelet/plugins/" + driverName
)

type driver struct{}

func (driver) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	prepared := make(map[types.UID]kubeletplugin.PrepareResult)
	for _, claim := range claims {
		var devices []kubeletplugin.Device
		for _, result := range claim.Status.Allocation.Devices.Results {
			if result.Driver == driverName {
				devices = append(devices, kubeletplugin.Device{
					Requests:     []string{result.Request},
					PoolName:     result.Pool,
					DeviceName:   result.Device,
					CDIDeviceIDs: []string{cdiKind + "=" + result.Device},
				})
			}
		}
		prepared[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return prepared, nil
}

func (driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	done := make(map[types.UID]error)
	for _, claim := range claims {
		done[claim.UID] = nil
	}
	return done, nil
}

func (driver) HandleError(_ context.Context, err error, msg string) {
	fmt.Fprintf(os.Stderr, "%s: %v\n", msg, err)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		os.Exit(1)
	}
}

func (driver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	kubeconfig := flag.String("kubeconfig", "", "file")
	node := flag.String("node", "", "name of the Node")
	cards := flag.Int("cards", 0, "how many cards, with the minor numbers from 0 on")
	cdi := flag.String("cdi", "", "folder of the CDI specifications")
	flag.Parse()

	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	if err := writeSpecification(*cdi, *cards); err != nil {
		return err
	}
	if err := os.MkdirAll(dataFolder, 0o750); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	helper, err := kubeletplugin.Start(ctx, driver{},
		kubeletplugin.DriverName(driverName),
		kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName(*node),
		kubeletplugin.PluginDataDirectoryPath(dataFolder),
		kubeletplugin.HealthService(false),
	)
	if err != nil {
		return err
	}
	defer helper.Stop()
	var devices []resourceapi.Device
	for minor := range *cards {
		devices = append(devices, resourceapi.Device{Name: name(minor)})
	}
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: devices}}}
	if err := helper.PublishResources(ctx, resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{*node: pool}}); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func name(minor int) string { return fmt.Sprintf("gpu-%d", minor) }

func writeSpecification(folder string, cards int) error {
	type object = map[string]any
	var devices []object
	for minor := range cards {
		node := object{"path": fmt.Sprintf("/dev/nvidia%d", minor), "permissions": "rwm"}
		devices = append(devices, object{"name": name(minor), "containerEdits": object{"deviceNodes": []object{node}}})
	}
	text, err := json.Marshal(object{"cdiVersion": "0.5.0", "kind": cdiKind, "devices": devices})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "k8s."+driverName+".json"), text, 0o644)
}
